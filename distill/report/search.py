"""The table of a search: what each candidate scored in each stage, and what became of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from distill.report.columns import Column, mean_and_deviation, short_keys
from distill.report.comparison import Comparison, Figure
from distill.report.formats import NOTHING, setting

Record = Mapping[str, Any]


def search_columns(record: Record, candidates: Comparison, finalists: Comparison) -> list[Column]:
    """Columns with a line per candidate, those that came furthest first.

    Args:
        record: what `search.json` has.
        candidates: the settings in which they differ.
        finalists: their runs, with test scores if they were scored.
    """
    names = _order(record)
    seeds = {name: record["finalists"].get(name, []) for name in names}
    settings = {group.rows[0].name: group.settings for group in candidates.groups}
    tests = {row.name: row.figures["average.all"] for row in finalists.rows if "average.all" in row.figures}
    columns = [Column("candidate", tuple(names), right=False)]
    for key, header in zip(candidates.differing, short_keys(candidates.differing), strict=True):
        columns.append(Column(header, tuple(setting(settings[name].get(key)) for name in names), right=False))
    for stage in record["stages"]:
        scores = {one["name"]: f"{one['validation']:.2f}" for one in stage["ranking"]}
        columns.append(Column(f"validation {stage['share']:.0%}", tuple(scores.get(name, NOTHING) for name in names)))
    if record["search"]["seeds"]:
        means = tuple(_mean([run["validation"] for run in seeds[name]]) for name in names)
        columns.append(Column("validation, seeds", means))
    if tests:
        found = ([tests[run["name"]] for run in seeds[name] if run["name"] in tests] for name in names)
        columns.append(Column("test average", tuple(map(_mean, found))))
    columns.append(Column("result", tuple(_result(record, name) for name in names), right=False))
    for key, form in (("steps", "{:,}"), ("seconds", "{:,.0f}")):
        columns.append(Column(key, tuple(form.format(sum(run[key] for run in _runs(record, name))) for name in names)))
    return columns


def search_notes(record: Record) -> list[str]:
    """Errors of failed candidates, the choice, and the cost beside that of training every candidate."""
    errors = {f"{name} at {stage['share']:.0%}": error for stage in record["stages"] for name, error in _failed(stage)}
    errors |= dict(_failed(record))
    choice, first = record["choice"], record["stages"][0]
    trained = [run for name in record["candidates"] for run in _runs(record, name)]
    steps, seconds = (sum(run[key] for run in trained) for key in ("steps", "seconds"))
    each = sum(run["steps"] for run in first["ranking"]) / len(first["ranking"]) / first["share"]
    return [
        *(f"{name} failed and dropped out: {error}" for name, error in errors.items()),
        f"chosen: {choice['name']}, validation average {mean_and_deviation(Figure(**choice['validation']), 2)}, before "
        "any test file was opened",
        f"{steps:,} steps were trained in {seconds:,.0f} s; all candidates in full, with one seed, are about "
        f"{each * len(record['candidates']):,.0f}",
    ]


def _failed(part: Record) -> list[tuple[str, str]]:
    return list(part["failed"].items())


def _order(record: Record) -> list[str]:
    """Names by the last stage that they were trained in, then by rank; failed ones after the others."""
    means = {name: Figure.of([run["validation"] for run in runs]).mean for name, runs in record["finalists"].items()}
    found = sorted(means, key=lambda name: -means[name])
    for stage in reversed(record["stages"]):
        found += [*(one["name"] for one in stage["ranking"]), *stage["failed"]]
    return list(dict.fromkeys(found))


def _runs(record: Record, name: str) -> list[Record]:
    """The runs of a candidate, that of the last stage and of its seed once."""
    runs = [one for stage in record["stages"] for one in stage["ranking"] if one["name"] == name]
    return list({one["run"]: one for one in [*runs, *record["finalists"].get(name, ())]}.values())


def _result(record: Record, name: str) -> str:
    if name == record["choice"]["name"]:
        return "chosen"
    if name in record["finalists"]:
        return "finalist"
    for stage in record["stages"]:
        if name not in stage["kept"]:
            return f"{'failed' if name in stage['failed'] else 'dropped'} at {stage['share']:.0%}"
    return "failed with a seed"


def _mean(values: Sequence[float]) -> str:
    return mean_and_deviation(Figure.of(values), 2) if values else NOTHING

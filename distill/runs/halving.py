"""A search for the best recipe: successive halving of a sweep's runs, ranked on validation files.

Every candidate is trained for a small share of its steps, the best of them for a larger one, and so on (Jamieson and
Talwalkar, arXiv 1502.07943; Hyperband, 1603.06560, repeats this with other stages). Each stage trains from the start,
so that schedules fit its length. `search.json` in the sweep's folder has every decision. Test files are not opened
before the choice stands there, and only the finalists are scored on them.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distill.config import RunConfig
from distill.config.reading import build_config
from distill.errors import ConfigError, RunFolderError, SearchError
from distill.report.comparison import Comparison, Figure, Row, compare, read_row
from distill.run_folder import read_record
from distill.runs.sweep import PlannedRun, SearchConfig, SweepConfig, SweepProgress, check_each, train_all
from teacher_cache.storage.files import atomic_write

SEARCH = "search.json"
FINALISTS = "finalists"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        record: what `search.json` has: `search`, `candidates` (settings by name), `stages` (each with `share`,
            `ranking`, `failed` and `kept`), `finalists` (by name, an entry as in `ranking` for each seed), their
            `failed` runs and `choice`.
        candidates: the settings in which they differ, without figures.
        comparison: the finalists' runs, with test scores if the sweep has `data`.
        failed: name of a finalist's run that could not be scored -> its error in one line.
        seconds: of this call.
    """

    output_dir: str
    record: Mapping[str, Any]
    candidates: Comparison
    comparison: Comparison
    failed: Mapping[str, str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        shown = {key: self.record[key] for key in ("search", "stages", "finalists", "choice")}
        return {
            "output_dir": self.output_dir,
            **shown,
            "failed": dict(self.failed),
            "seconds": self.seconds,
            **self.comparison.to_json(),
        }


def plan_search(config: SweepConfig) -> list[PlannedRun]:
    """The candidates, checked with the steps of every stage.

    Raises:
        KnownError: as `SweepConfig.plan`, or the candidates cannot be ranked.
    """
    candidates, search = config.plan(), _search(config)
    for number, share in enumerate(search.stages[:-1]):  # the last stage has the candidates' own steps
        check_each([_stage_run(config, one, number, share) for one in candidates])
    return candidates


def search(
    config: SweepConfig,
    *,
    announce: Callable[[str], None] = lambda line: None,
    report: Callable[[SweepProgress], None] = lambda progress: None,
) -> SearchResult:
    """Choose the candidate with the best validation scores, then score the finalists on the sweep's `data`.

    A stage ends when all of its runs ended; failed candidates drop out. Recorded stages are not repeated.

    Args:
        announce: called with a line for every run, stage and choice.
        report: called when a run starts or ends.

    Raises:
        ConfigError: an invalid setting, found before the first run starts.
        RunFolderError: the folder has another search.
        SearchError: every candidate failed.
    """
    start = time.monotonic()
    candidates, settings = plan_search(config), _search(config)
    path = Path(config.output_dir) / SEARCH
    record = _load(path, settings, candidates)
    names = {one.name: one for one in candidates}
    runs: list[PlannedRun] = list(candidates)
    for number, share in enumerate(settings.stages):
        runs = [_stage_run(config, names[one.name], number, share) for one in runs]
        if number == len(record["stages"]):
            label = f"stage {number + 1} of {len(settings.stages)} ({share:.0%} of the steps)"
            announce(f"{label}: {len(runs)} candidates")
            _, failed = train_all(config, runs, data=None, announce=announce, report=report)
            stage = _ranked(share, runs, failed, settings.kept(len(runs)), label)
            record["stages"].append(stage)
            _write(path, record)
            announce(f"{label}: {', '.join(stage['kept'])} of {len(runs)} go on")
        kept = record["stages"][number]["kept"]
        runs = sorted((one for one in runs if one.name in kept), key=lambda one: kept.index(one.name))
    seeds = {one.name: _seed_runs(config, one, settings.seeds) for one in runs}
    if record["choice"] is None:
        trained = [run for several in seeds.values() for run in several]
        announce(f"finalists: {', '.join(seeds)}; {len(trained)} runs")
        _, failed = train_all(config, trained, data=None, announce=announce, report=report)
        record["finalists"], record["failed"] = _finalists(seeds, failed), failed
        record["choice"] = choice = _choice(record["finalists"])
        _write(path, record)
        announce(f"chosen on validation files: {choice['name']}")
    final = [run for name in record["finalists"] for run in seeds[name]]
    scored: dict[str, str] = {}
    if config.data is not None:
        _, scored = train_all(config, final, data=config.data, announce=announce, report=report)
    return SearchResult(
        output_dir=config.output_dir,
        record=record,
        candidates=compare([Row(one.name, str(one.folder), "finished", one.config) for one in candidates]),
        comparison=compare([read_row(one.folder, one.name, one.config, scored.get(one.name)) for one in final]),
        failed=scored,
        seconds=round(time.monotonic() - start, 3),
    )


def _search(config: SweepConfig) -> SearchConfig:
    if config.search is None:
        raise ConfigError("search is not set; set its stages, or call distill.runs.sweep.sweep")
    return config.search


def _stage_run(config: SweepConfig, candidate: PlannedRun, number: int, share: float) -> PlannedRun:
    """The run of a candidate in a stage."""
    folder = Path(config.output_dir) / f"stage-{number + 1}" / candidate.name
    training = candidate.config.training
    if share < 1 and training.max_steps > 0:
        training = replace(training, max_steps=max(1, round(share * training.max_steps)))
    elif share < 1:
        training = replace(training, num_train_epochs=share * training.num_train_epochs)
    return PlannedRun(candidate.name, replace(candidate.config, output_dir=str(folder), training=training))


def _seed_runs(config: SweepConfig, finalist: PlannedRun, seeds: Sequence[int]) -> list[PlannedRun]:
    """The runs of a finalist; that of the last stage has one of the seeds already."""
    runs = []
    for seed in seeds or [finalist.config.training.seed]:
        if seed == finalist.config.training.seed:
            runs.append(replace(finalist, name=f"{finalist.name}-seed={seed}" if seeds else finalist.name))
            continue
        name = f"{finalist.name}-seed={seed}"
        folder = Path(config.output_dir) / FINALISTS / name
        training = replace(finalist.config.training, seed=seed)
        runs.append(PlannedRun(name, replace(finalist.config, output_dir=str(folder), training=training)))
    return runs


def _figures(run: PlannedRun) -> dict[str, Any]:
    """Validation average of the exported student, agreement and cost, from the record of a finished run."""
    record: Any = read_record(run.folder)
    (point,) = [one for one in record["validation"]["points"] if one["step"] == record["exported"]["step"]]
    return {
        "run": f"{run.folder.parent.name}/{run.folder.name}",
        "validation": point["validation"]["average"],
        "agreement": ((record["agreement"] or {}).get("after") or {}).get("spearman"),
        "steps": record["steps"],
        "seconds": record["seconds"],
    }


def _ranked(
    share: float, runs: Sequence[PlannedRun], failed: Mapping[str, str], keep: int, label: str
) -> dict[str, Any]:
    """The record of a stage: by validation average, then by agreement, then in the order of the file."""
    ranking = [{"name": one.name, **_figures(one)} for one in runs if one.name not in failed]
    if not ranking:
        name, error = next(iter(failed.items()))
        raise SearchError(f"{label}: every candidate failed, {name} with: {error}")
    # Equal scores are ranked by agreement, then in the order of the file: the sort is stable.
    ranking.sort(key=lambda one: (one["validation"], one["agreement"] or 0.0), reverse=True)
    kept = [one["name"] for one in ranking[:keep]]
    return {"share": share, "ranking": ranking, "failed": dict(failed), "kept": kept}


def _finalists(seeds: Mapping[str, Sequence[PlannedRun]], failed: Mapping[str, str]) -> dict[str, Any]:
    """The figures of each finalist's runs; a finalist with a failed run drops out."""
    found = {
        name: [{"name": run.name, "seed": run.config.training.seed, **_figures(run)} for run in runs]
        for name, runs in seeds.items()
        if not any(run.name in failed for run in runs)
    }
    if not found:
        name, error = next(iter(failed.items()))
        raise SearchError(f"every finalist has a failed run, {name} with: {error}")
    return found


def _choice(finalists: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The finalist with the highest mean validation average; the first of equal ones, which led the last stage."""
    means = {name: Figure.of([run["validation"] for run in runs]) for name, runs in finalists.items()}
    name = max(means, key=lambda one: means[one].mean)
    return {"name": name, "validation": asdict(means[name])}


def _load(path: Path, settings: SearchConfig, candidates: Sequence[PlannedRun]) -> dict[str, Any]:
    """The decisions so far, none in a new folder.

    Raises:
        RunFolderError: they are those of another search.
    """
    known = {one.name: _without_paths(one.config) for one in candidates}
    new = {"search": asdict(settings), "candidates": {name: asdict(config) for name, config in known.items()}}
    new = json.loads(json.dumps(new))
    old = read_record(path.parent, path.name)
    if old is None:
        return new | {"stages": [], "finalists": {}, "failed": {}, "choice": None}
    there = old["search"]
    differing = [
        f"search.{key}: {there[key]!r} there, {now!r} now" for key, now in new["search"].items() if there[key] != now
    ]
    for name in old["candidates"].keys() ^ known.keys():
        differing.append(f"candidate {name} {'there' if name in old['candidates'] else 'now'} only")
    for name in old["candidates"].keys() & known.keys():
        before: RunConfig = build_config(RunConfig, old["candidates"][name], "")
        for key, (now, value) in known[name].difference(before).items():
            differing.append(f"candidate {name}, {key}: {value!r} there, {now!r} now")
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise RunFolderError(f"{path} has another search ({min(differing)}{more}); choose another `output_dir`")
    return old


def _without_paths(config: RunConfig) -> RunConfig:
    """The settings without paths that may change between two calls."""
    return replace(config, output_dir="", cache="", evaluation=replace(config.evaluation, data=""))


def _write(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(json.dumps(record, indent=2, ensure_ascii=False).encode())

"""Ratios and Markdown tables of `benchmarks/store.py`."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.peers import CONTENDERS, DEFAULT, HF_MAP, MEMORY_MAP, OURS, RAW, STREAMERS, ZARR

Figures = dict[str, Any]
FLOAT32_BYTES = 4
MIB = 2**20


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' ratios, which a slow round of both does not change."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def ratios(results: Figures) -> dict[str, float]:
    """Every ratio whose two sides were measured.

    The last one compares the stream of the default encoding with the fastest other data loader.
    """
    found: dict[str, float] = {}
    stream = {name: figures["rates"] for name, figures in results.get("stream", {}).items()}
    hot, cold = (
        {n: f["medians"] for n, f in results.get("gather", {}).get(kind, {}).items()} for kind in ("hot", "cold")
    )
    written = {name: figures["rates"] for name, figures in results.get("write", {}).items()}

    def compare(label: str, figures: dict[str, Sequence[float]], upper: str, lower: str) -> None:
        if upper in figures and lower in figures:
            found[f"{label}: {upper} / {lower}"] = ratio(figures[upper], figures[lower])

    for name in OURS:
        compare("rows/s", stream, name, MEMORY_MAP)
    for name in (*STREAMERS, ZARR):
        compare("rows/s", stream, DEFAULT, name)
    compare("hot gather time", hot, RAW, MEMORY_MAP)
    compare("hot gather time", hot, HF_MAP, RAW)
    compare("hot gather time", hot, ZARR, DEFAULT)
    compare("cold gather time", cold, MEMORY_MAP, RAW)
    compare("cold gather time", cold, MEMORY_MAP, DEFAULT)
    compare("shards written a second", written, DEFAULT, ZARR)
    for file, one in results.get("size", {}).items():
        for storage, sizes in one["formats"].items():
            found[f"bytes of {file}: float32 / {storage}"] = smaller(sizes, one["dims"])
    measured = [name for name in STREAMERS if name in stream]
    if measured and DEFAULT in stream:
        fastest = max(measured, key=lambda name: statistics.median(stream[name]))
        found[f"rows/s: {DEFAULT} / {fastest}, the fastest of these"] = ratio(stream[DEFAULT], stream[fastest])
    return found


def smaller(sizes: Figures, dims: int) -> float:
    """Size of float32 rows relative to those of one encoding."""
    return float(FLOAT32_BYTES * sizes["stored"] * dims / sizes["bytes"])


def main_figure(found: dict[str, float]) -> str:
    """The last ratio, as one line."""
    if not found:
        return "no ratio: its two sides were not measured"
    label, value = list(found.items())[-1]
    return f"{label} = {value:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _in_order(figures: Figures) -> list[tuple[str, Figures]]:
    return [(name, figures[name]) for name in CONTENDERS if name in figures]


def _stream(results: Figures) -> str:
    figures = results["stream"]
    base = figures.get(MEMORY_MAP)

    def row(name: str, one: Figures) -> list[str]:
        relative = f"{ratio(one['rates'], base['rates']):.2f}" if base else ""
        peaks = [f"{one[key] / MIB:,.0f}" for key in ("peak", "anonymous_growth", "file_growth")]
        return [name, f"{statistics.median(one['rates']):,.0f}", relative, *peaks, f"{one['bytes'] / MIB:,.0f}"]

    head = ["shuffled stream", "rows/s", "of memory map", "peak MiB", "grown, anonymous", "grown, file", "disk MiB"]
    return table(head, [row(*one) for one in _in_order(figures)])


def _gather(results: Figures) -> str:
    hot, cold = results["gather"]["hot"], results["gather"]["cold"]

    def cells(figures: Figures | None) -> list[str]:
        return [f"{statistics.median(figures['medians']):.3g}", f"{figures['p95']:.3g}"] if figures else ["", ""]

    def left(name: str) -> str:
        return f"{100 * cold[name]['resident']:.1f}" if name in cold else ""

    rows = [[n, *cells(hot.get(n)), *cells(cold.get(n)), left(n)] for n in CONTENDERS if n in hot or n in cold]
    return table(["256 random rows", "hot ms", "hot p95", "cold ms", "cold p95", "% of pages not cold"], rows)


def _memory(results: Figures) -> str:
    rows = []
    for name, sizes in results["memory"].items():
        for count, one in sizes.items():
            torch = "with torch" if one["torch"] else "without torch"
            growth = [f"{one[key] / MIB:,.1f}" for key in ("peak", "anonymous_growth", "file_growth")]
            rows.append([f"{name}, {torch}", f"{int(count):,}", *growth])
    return table(["memory of a stream", "rows", "peak MiB", "grown, anonymous", "grown, file"], rows)


def _shuffle(results: Figures) -> str:
    def row(name: str, one: Figures) -> list[str]:
        return [name, f"{one['ratio']:.2f}", f"{one['rows']:,}", f"{one['twice']:,}"]

    head = ["same-source pairs in a batch", "of a true permutation", "rows seen", "of them twice"]
    return table(head, [row(*one) for one in _in_order(results["shuffle"])])


def _write(results: Figures) -> str:
    def row(name: str, one: Figures) -> list[str]:
        values = FLOAT32_BYTES * one["rows"] * results["dims"]
        return [name, f"{statistics.median(one['rates']):,.0f}", f"{values / one['bytes']:.2f}"]

    return table(["writing shards", "rows/s", "float32 / disk"], [row(*one) for one in _in_order(results["write"])])


def _size(results: Figures) -> str:
    rows = []
    for file, one in results["size"].items():
        for storage, found in one["formats"].items():
            errors = [f"{found['worst']:.1e}", f"{found['mean']:.1e}"]
            rows.append([f"{file}, {storage}", f"{found['stored']:,}", f"{smaller(found, one['dims']):.2f}", *errors])
    return table(["real vectors", "rows", "float32 / disk", "worst 1 - cos", "mean 1 - cos"], rows)


_TABLES = {"stream": _stream, "gather": _gather, "memory": _memory, "shuffle": _shuffle, "write": _write, "size": _size}


def markdown(results: Figures) -> str:
    """All results as tables, with a description of the machine."""
    versions = ", ".join(f"{library} {found}" for library, found in results["versions"].items())
    parts = [
        f"{results['rows']:,} x {results['dims']} float16, medians of {results['rounds']} rounds; "
        f"{results['cores']} cores, Python {results['python']}, {versions}.\n"
    ]
    parts += [make(results) for measure, make in _TABLES.items() if results.get(measure)]
    if results["missing"]:
        parts.append(table(["not measured", "why"], results["missing"].items()))
    if results["ratios"]:
        rows = [[label, f"{value:.2f}"] for label, value in results["ratios"].items()]
        parts.append(table(["ratio", "median"], rows))
    return "\n".join(parts)

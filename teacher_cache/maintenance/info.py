"""What is in a cache, and its vectors of single texts; reads only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from teacher_cache.storage.index import Index
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES

# Quarantined rows of a space that are listed with their texts.
LISTED = 100


def describe(path: str | Path) -> dict[str, Any]:
    """Rows, corpora and spaces, as `tcache info --json` prints them."""
    with TeacherCache.open(path) as cache:
        return {
            "rows": cache.rows,
            "corpora": {
                name: {
                    "rows": record.records,
                    "distinct": record.distinct,
                    "columns": list(record.columns),
                    "fingerprint": record.fingerprint,
                    "sources": [source.name for source in record.sources],
                    "domains": dict(zip(record.domains, record.domain_records, strict=True)),
                }
                for name, record in cache.corpora().items()
            },
            "spaces": {slug: _space(cache, view) for slug, view in cache.spaces().items()},
        }


def _space(cache: TeacherCache, view: SpaceView) -> dict[str, Any]:
    reasons = view.quarantined()
    listed = sorted(reasons)[:LISTED]
    return {
        "dim": view.dims,
        "storage": view.record.storage,
        "present": view.present_count(),
        "quarantined": len(reasons),
        "quarantined_rows": [
            {"row": row, "text": text, "reason": reasons[row]}
            for row, text in zip(listed, cache.texts(listed), strict=True)
        ],
        "bytes": _bytes(view.index, view.array_name),
        "worst_error": view.worst_error(),
        "teacher": view.space.teacher,
        "fingerprint": view.space.fingerprint,
        "description": view.space.describe(),
        "space": view.space.to_json(),
        "columns": _columns(view),
    }


def _columns(view: SpaceView) -> dict[str, Any]:
    """Rows, bytes, quarantined rows and settings of each column besides the vectors."""
    tokens = view.tokens
    if tokens is None:
        return {}
    columns: dict[str, Any] = {}
    for name, arrays in (("tokens", (STATES, PIECES)), ("attention", (ATTENTION,))):
        if arrays[0] in tokens.columns:
            columns[name] = {
                "present": tokens.present_count(arrays[0]),
                "quarantined": len(tokens.quarantined(arrays[0])),
                "bytes": sum(_bytes(view.index, tokens.columns[array].name) for array in arrays),
            }
    columns["tokens"] |= {
        "storage": tokens.record.storage,
        "width": tokens.record.shape.width,
        "worst_error": tokens.worst_error(),
    }
    if tokens.record.attention is not None:
        columns["attention"] |= {"layers": list(tokens.record.attention)}
    return columns


def _bytes(index: Index, array: str) -> int:
    return sum(record.size for _, record in index.iter_shards(array))


def look_up(path: str | Path, texts: Sequence[str], space: str | None = None) -> list[dict[str, Any]]:
    """For each text, its `row`, `vector` and `norm`, or `why` there is none."""
    with TeacherCache.open(path) as cache:
        view = cache.space(space)
        rows = cache.lookup(texts)
        reasons = view.quarantined()
        found = []
        for text, row in zip(texts, rows.tolist(), strict=True):
            entry: dict[str, Any] = {"text": text, "row": row, "vector": None, "norm": None, "why": ""}
            if row < 0:
                entry["why"] = "not in this cache"
            elif row in reasons:
                entry["why"] = f"quarantined: {reasons[row]}"
            elif not view.present(np.array([row])).all():
                entry["why"] = f"has no vector in space {view.slug}"
            else:
                vector = view.gather([row])[0]
                entry |= {"vector": vector.tolist(), "norm": float(np.linalg.norm(vector))}
            found.append(entry)
        return found

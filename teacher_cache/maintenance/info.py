"""What is in a cache, and what it says of single texts; reads only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES

# Quarantined rows of a space that are told with their texts.
LISTED = 100


def describe(path: str | Path) -> dict[str, Any]:
    """Rows, corpora and spaces, with the names that `tcache info --json` promises."""
    with TeacherCache.open(path) as cache:
        spaces = {}
        for slug, view in cache.spaces().items():
            present, stored, worst = 0, 0, 0.0
            for _, record in cache.index.iter_shards(view.array_name):
                present += int(record.present.sum())
                stored += record.size
                worst = max(worst, record.worst_error)
            refused = view.quarantined()
            listed = sorted(refused)[:LISTED]
            spaces[slug] = {
                "dim": view.dims,
                "storage": view.record.storage,
                "present": present,
                "quarantined": len(refused),
                "quarantined_rows": [
                    {"row": row, "text": text, "reason": refused[row]}
                    for row, text in zip(listed, cache.texts(np.array(listed, dtype=np.int64)), strict=True)
                ],
                "bytes": stored,
                "worst_error": worst,
                "teacher": view.space.teacher,
                "fingerprint": view.space.fingerprint,
                "description": view.space.describe(),
                "space": view.space.to_json(),
                "columns": _columns(view),
            }
        corpora = {
            name: {
                "rows": record.records,
                "distinct": record.distinct,
                "columns": list(record.columns),
                "fingerprint": record.fingerprint,
                "sources": [source.name for source in record.sources],
                "domains": dict(zip(record.domains, record.domain_records, strict=True)),
            }
            for name, record in cache.corpora().items()
        }
        return {"rows": cache.rows, "corpora": corpora, "spaces": spaces}


def _columns(view: SpaceView) -> dict[str, Any]:
    """Of each column besides the vectors: its rows, bytes and refusals, and what is said of all of them."""
    tokens = view.tokens
    if tokens is None:
        return {}
    told: dict[str, Any] = {}
    for name, arrays in (("tokens", (STATES, PIECES)), ("attention", (ATTENTION,))):
        if arrays[0] in tokens.columns:
            records = [record for array in arrays for _, record in view.index.iter_shards(tokens.columns[array].name)]
            told[name] = {
                "present": tokens.present_count(arrays[0]),
                "quarantined": len(tokens.quarantined(arrays[0])),
                "bytes": sum(record.size for record in records),
            }
    told["tokens"] |= {
        "storage": tokens.record.storage,
        "width": tokens.record.shape.width,
        "worst_error": tokens.worst_error(),
    }
    if tokens.record.attention is not None:
        told["attention"] |= {"layers": list(tokens.record.attention)}
    return told


def look_up(path: str | Path, texts: Sequence[str], space: str | None = None) -> list[dict[str, Any]]:
    """For each text: `row`, `vector` and `norm`, or `why` there is none."""
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
                vector = view.gather(np.array([row]))[0]
                entry |= {"vector": vector.tolist(), "norm": float(np.linalg.norm(vector))}
            found.append(entry)
        return found

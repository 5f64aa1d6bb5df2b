"""Which tokens of a teacher say the same as which tokens of a student, when both cut one text in their own way.

A token is the characters it covers, so no tokenizer's marks (`Ġ`, `▁`, `##`) have to be known. White space that a
piece carries is stripped, and strings are compared in lower case where the student cannot tell the cases apart.
Specials meet by their part: the opening one the opening one, the closing one the closing one. Tokens of a prompt,
and pieces of white space alone, meet nothing.

- `offset`: the pair whose members share more characters with each other than with any other token; exact,
  O(S + T). First of equals. One to one.
- `mined_types`: minimum edit distance between the distinct strings of both sides, as the published code of EMO
  does it: equal strings first, else the nearest; pairs that choose each other; the first occurrence of each
  string. A repeated word is mapped once, and pieces far apart in the text can meet. One to one.
- `mined_dp`: minimum edit distance between positions: the monotone matching that leaves the fewest edits, a token
  without partner costing its length. Strings without a common character never meet. One to one.
- `dtw_mean`: dynamic time warping over edit distances (CDM), each student token taking the mean of the teacher
  tokens that the path pairs it with.
- `dtw_strict`: of that path only pairs whose members have no other partner and the same string, as the published
  code for encoders does it. One to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import TeacherError
from teacher_cache.tokens.request import CLOSING, OPENING, ROLE, TEXT_TOKEN

METHODS = ("offset", "mined_types", "mined_dp", "dtw_mean", "dtw_strict")
# Methods that give a token one counterpart at most, on both sides.
ONE_TO_ONE = ("offset", "mined_types", "mined_dp", "dtw_strict")

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Alignment:
    """The entries of an alignment matrix of S student and T teacher tokens that are not 0, by student token.

    Attributes:
        student: `(n,)` int32.
        teacher: `(n,)` int32.
        weight: `(n,)` float32; those of one student token sum to 1.
    """

    student: npt.NDArray[np.int32]
    teacher: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Words:
    """The tokens of one side that cover some of the text: string, place among all tokens, characters."""

    strings: list[str]
    places: list[int]
    starts: list[int]
    ends: list[int]


def align(
    text: str, teacher: npt.NDArray[np.int32], student: npt.NDArray[np.int32], method: str, *, lower: bool
) -> Alignment:
    """The teacher's tokens of a text mapped onto the student's.

    Args:
        teacher: `(T, 4)` pieces, as `TextTokens.pieces` has them.
        student: `(S, 4)` pieces of the same text.
        method: a name of `METHODS`.
        lower: compare strings in lower case.

    Raises:
        TeacherError: an unknown method.
    """
    check_method(method)
    ours, theirs = _words(text, student, lower), _words(text, teacher, lower)
    pairs: Pairs = []
    if ours.strings and theirs.strings:
        found = _ALIGNERS[method](ours, theirs)
        pairs = [(ours.places[s], theirs.places[t]) for s, t in found]
    for role in (OPENING, CLOSING):
        mine, yours = np.flatnonzero(student[:, ROLE] == role), np.flatnonzero(teacher[:, ROLE] == role)
        pairs += [(int(s), int(t)) for s, t in zip(mine, yours, strict=False)]
    return of_pairs(np.array(sorted(pairs), dtype=np.int32).reshape(-1, 2))


def check_method(method: str) -> None:
    """Refuse a method that there is not.

    Raises:
        TeacherError: no name of `METHODS`.
    """
    if method not in METHODS:
        raise TeacherError(f"alignment {method!r} is unknown; expected one of {', '.join(METHODS)}")


def of_pairs(pairs: npt.NDArray[np.int32]) -> Alignment:
    """The alignment of `(n, 2)` pairs of a student and a teacher token, ascending: the partners of one weigh alike."""
    student, teacher = np.ascontiguousarray(pairs.T)
    return Alignment(student, teacher, (1 / np.bincount(student)[student]).astype(np.float32))


def dense(
    alignments: Sequence[Alignment], student_mask: npt.NDArray[np.bool_], teacher_mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """`(B, n_s, n_T)` float32: the matrices of B texts in one padded batch.

    Args:
        student_mask: `(B, n_s)`, true for tokens; each text's are next to each other, on either side of the padding.
        teacher_mask: `(B, n_T)`, likewise.
    """
    matrix = np.zeros((*student_mask.shape, teacher_mask.shape[1]), dtype=np.float32)
    if alignments:
        text = np.repeat(np.arange(len(alignments)), [len(alignment.student) for alignment in alignments])
        student = np.concatenate([alignment.student for alignment in alignments])
        teacher = np.concatenate([alignment.teacher for alignment in alignments])
        places = student + student_mask.argmax(axis=1)[text], teacher + teacher_mask.argmax(axis=1)[text]
        matrix[text, *places] = np.concatenate([alignment.weight for alignment in alignments])
    return matrix


def edit_distances(ours: Sequence[str], theirs: Sequence[str]) -> npt.NDArray[np.int32]:
    """`(len(ours), len(theirs))` int32: Levenshtein distances of all pairs, computed side by side.

    One step a character of the longest of `ours`: along `theirs`, the distance in which every further insertion
    costs 1 is a running minimum.
    """
    ours_length, theirs_length = _lengths(ours), _lengths(theirs)
    first, second = _characters(ours, ours_length), _characters(theirs, theirs_length)
    steps = np.arange(second.shape[1] + 1, dtype=np.int32)
    row = np.broadcast_to(steps, (len(ours), len(theirs), len(steps)))
    distances = np.broadcast_to(theirs_length, (len(ours), len(theirs))).copy()
    for done, characters in enumerate(first.T, start=1):
        changed = characters[:, None, None] != second[None]
        best = np.empty_like(row)
        best[..., 0] = done
        np.minimum(row[..., 1:] + 1, row[..., :-1] + changed, out=best[..., 1:])
        row = np.minimum.accumulate(best - steps, axis=2) + steps
        ended = np.flatnonzero(ours_length == done)
        distances[ended] = np.take_along_axis(row[ended], theirs_length[None, :, None], axis=2)[..., 0]
    return distances


def _words(text: str, pieces: npt.NDArray[np.int32], lower: bool) -> _Words:
    words = _Words([], [], [], [])
    for place, (_, start, end, role) in enumerate(pieces.tolist()):
        if role != TEXT_TOKEN:
            continue
        raw = text[start:end]
        string = raw.strip()
        if string:
            start += len(raw) - len(raw.lstrip())
            words.strings.append(string.lower() if lower else string)
            words.places.append(place)
            words.starts.append(start)
            words.ends.append(start + len(string))
    return words


def _by_offset(ours: _Words, theirs: _Words) -> Pairs:
    best_of_ours, best_of_theirs = [(0, -1)] * len(ours.places), [(0, -1)] * len(theirs.places)
    s = t = 0
    while s < len(best_of_ours) and t < len(best_of_theirs):
        shared = min(ours.ends[s], theirs.ends[t]) - max(ours.starts[s], theirs.starts[t])
        if shared > best_of_ours[s][0]:
            best_of_ours[s] = (shared, t)
        if shared > best_of_theirs[t][0]:
            best_of_theirs[t] = (shared, s)
        if ours.ends[s] < theirs.ends[t]:
            s += 1
        else:
            t += 1
    return [(s, t) for s, (_, t) in enumerate(best_of_ours) if t >= 0 and best_of_theirs[t][1] == s]


def _by_type(ours: _Words, theirs: _Words) -> Pairs:
    mine, yours = list(dict.fromkeys(ours.strings)), list(dict.fromkeys(theirs.strings))
    # An equal string has distance 0 and no other has: "equal first, else the nearest" is one argmin.
    distances = edit_distances(mine, yours)
    to_teacher, to_student = distances.argmin(axis=1), distances.argmin(axis=0)
    chosen = [(s, int(t)) for s, t in enumerate(to_teacher) if to_student[t] == s]
    return [(ours.strings.index(mine[s]), theirs.strings.index(yours[t])) for s, t in chosen]


def _by_position(ours: _Words, theirs: _Words) -> Pairs:
    distances = _string_distances(ours, theirs)
    mine, yours = _lengths(ours.strings), _lengths(theirs.strings)
    # A pair of strings without a common character must be no cheaper than two tokens without partner.
    never = mine[:, None] + yours[None]
    cost = np.where(distances < np.maximum(mine[:, None], yours[None]), distances, never)
    skipped = np.concatenate([np.zeros(1, np.int32), np.cumsum(yours, dtype=np.int32)])
    least = np.empty((len(mine) + 1, len(yours) + 1), dtype=np.int32)
    least[0] = skipped
    for s in range(len(mine)):
        best = least[s] + mine[s]
        np.minimum(best[1:], least[s, :-1] + cost[s], out=best[1:])
        least[s + 1] = np.minimum.accumulate(best - skipped) + skipped
    table, costs, pairs = least.tolist(), cost.tolist(), []
    s, t = len(mine), len(yours)
    while s and t:
        if costs[s - 1][t - 1] < never[s - 1, t - 1] and table[s][t] == table[s - 1][t - 1] + costs[s - 1][t - 1]:
            s, t = s - 1, t - 1
            pairs.append((s, t))
        elif table[s][t] == table[s - 1][t] + mine[s - 1]:
            s -= 1
        else:
            t -= 1
    return pairs


def _by_path(ours: _Words, theirs: _Words) -> Pairs:
    """Every pair of the cheapest path; of equals the diagonal step, then the teacher's."""
    cost = _string_distances(theirs, ours)
    least = np.empty_like(cost)
    least[0] = np.cumsum(cost[0], dtype=np.int32)
    for t in range(1, len(cost)):
        along = np.cumsum(cost[t], dtype=np.int32)
        best = least[t - 1].copy()
        np.minimum(best[1:], least[t - 1, :-1], out=best[1:])
        # Walking on along the row from j to k costs along[k] - along[j]: a running minimum again.
        least[t] = np.minimum.accumulate(best - along + cost[t]) + along
    table: list[list[int]] = least.tolist()
    t, s = len(table) - 1, len(table[0]) - 1
    pairs = [(s, t)]
    while t and s:
        diagonal, up, left = table[t - 1][s - 1], table[t - 1][s], table[t][s - 1]
        if diagonal <= up and diagonal <= left:
            t, s = t - 1, s - 1
        elif up <= left:
            t -= 1
        else:
            s -= 1
        pairs.append((s, t))
    pairs += [(s, place) for place in range(t)] + [(place, t) for place in range(s)]
    return pairs


def _by_strict_path(ours: _Words, theirs: _Words) -> Pairs:
    path = _by_path(ours, theirs)
    mine = np.bincount([s for s, _ in path])
    yours = np.bincount([t for _, t in path])
    return [(s, t) for s, t in path if mine[s] == yours[t] == 1 and ours.strings[s] == theirs.strings[t]]


_ALIGNERS = {
    "offset": _by_offset,
    "mined_types": _by_type,
    "mined_dp": _by_position,
    "dtw_mean": _by_path,
    "dtw_strict": _by_strict_path,
}


def _string_distances(ours: _Words, theirs: _Words) -> npt.NDArray[np.int32]:
    """`edit_distances` between all tokens, each distinct string looked at once."""
    mine = {string: place for place, string in enumerate(dict.fromkeys(ours.strings))}
    yours = {string: place for place, string in enumerate(dict.fromkeys(theirs.strings))}
    distances = edit_distances(list(mine), list(yours))
    return distances[np.ix_([mine[string] for string in ours.strings], [yours[string] for string in theirs.strings])]


def _lengths(strings: Sequence[str]) -> npt.NDArray[np.int32]:
    return np.fromiter(map(len, strings), dtype=np.int32, count=len(strings))


def _characters(strings: Sequence[str], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
    """`(n, longest)`: code points, shorter strings filled up with 0."""
    longest = int(lengths.max(initial=0))
    cells = max(longest, 1)  # numpy has no strings of 0 characters
    return np.array(strings, dtype=f"U{cells}").view(np.uint32).reshape(len(strings), cells)[:, :longest]

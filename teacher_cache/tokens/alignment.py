"""Alignment of a teacher's tokens with a student's, where both tokenize the same text differently.

Tokens are compared by the characters they cover, so tokenizer marks (`Ġ`, `▁`, `##`) do not matter. White space
around a token is stripped, and strings are compared in lower case if the student ignores case. Special tokens are
aligned by role: opening with opening, closing with closing. Tokens of a prompt, and tokens of white space alone,
are not aligned.

- `offset`: pairs of tokens that share more characters with each other than with any other token; the first of
  equals. Exact, O(S + T). One to one.
- `mined_types`: minimum edit distance between the distinct strings of both sides, as in the published code of EMO:
  equal strings first, else the nearest; pairs that choose each other; the first occurrence of each string. A repeated
  string is aligned once, and tokens far apart in the text can be paired. One to one.
- `mined_dp`: minimum edit distance between positions: the monotone matching with the fewest edits, where an
  unmatched token costs its length. Strings without a common character are never paired. One to one.
- `dtw_mean`: dynamic time warping over edit distances (CDM); each student token gets the mean of the teacher tokens
  that the path pairs it with.
- `dtw_strict`: pairs of that path whose tokens have no other partner and the same string, as in the published code
  for encoders. One to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import TeacherError
from teacher_cache.tokens.request import CLOSING, OPENING, ROLE, TEXT_TOKEN

METHODS = ("offset", "mined_types", "mined_dp", "dtw_mean", "dtw_strict")
# Methods that align each token, on both sides, with at most one other.
ONE_TO_ONE = ("offset", "mined_types", "mined_dp", "dtw_strict")

Pairs = list[tuple[int, int]]  # of a student and a teacher token


@dataclass(frozen=True)
class Alignment:
    """The n nonzero entries of an alignment matrix of S student and T teacher tokens, by student token."""

    student: npt.NDArray[np.int32]
    teacher: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]  # the weights of one student token sum to 1

    @classmethod
    def from_pairs(cls, pairs: npt.NDArray[np.int32]) -> Self:
        """The alignment of ascending `(n, 2)` pairs of student and teacher tokens, with equal weights per token."""
        student, teacher = np.ascontiguousarray(pairs.T)
        return cls(student, teacher, (1 / np.bincount(student)[student]).astype(np.float32))


@dataclass(frozen=True)
class _Tokens:
    """The tokens of one side that cover text: string, position among all tokens, first and end character."""

    strings: list[str]
    positions: list[int]
    starts: list[int]
    ends: list[int]


def align(
    text: str, teacher: npt.NDArray[np.int32], student: npt.NDArray[np.int32], method: str, *, lower: bool
) -> Alignment:
    """The alignment of one text.

    Args:
        teacher: `(T, 4)` pieces, as in `TextTokens.pieces`.
        student: `(S, 4)` pieces of the same text.
        method: one of `METHODS`.
        lower: compare strings in lower case.
    """
    check_method(method)
    student_tokens, teacher_tokens = _text_tokens(text, student, lower), _text_tokens(text, teacher, lower)
    pairs: Pairs = []
    if student_tokens.strings and teacher_tokens.strings:
        found = _ALIGNERS[method](student_tokens, teacher_tokens)
        pairs = [(student_tokens.positions[s], teacher_tokens.positions[t]) for s, t in found]
    for role in (OPENING, CLOSING):
        specials = (np.flatnonzero(pieces[:, ROLE] == role).tolist() for pieces in (student, teacher))
        pairs += zip(*specials, strict=False)
    return Alignment.from_pairs(np.array(sorted(pairs), dtype=np.int32).reshape(-1, 2))


def check_method(method: str) -> None:
    """Raise a TeacherError for a name that is not in `METHODS`."""
    if method not in METHODS:
        raise TeacherError(f"unknown alignment {method!r}; expected one of {', '.join(METHODS)}")


def dense_matrices(
    alignments: Sequence[Alignment], student_mask: npt.NDArray[np.bool_], teacher_mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """`(B, n_s, n_T)` float32: the alignment matrices of B texts in a padded batch.

    Args:
        student_mask: `(B, n_s)`, true for tokens; the tokens of a text are contiguous, padded on either side.
        teacher_mask: `(B, n_T)`, likewise.
    """
    matrix = np.zeros((*student_mask.shape, teacher_mask.shape[1]), dtype=np.float32)
    if alignments:
        text = np.repeat(np.arange(len(alignments)), [len(alignment.student) for alignment in alignments])
        student = np.concatenate([alignment.student for alignment in alignments])
        teacher = np.concatenate([alignment.teacher for alignment in alignments])
        entries = student + student_mask.argmax(axis=1)[text], teacher + teacher_mask.argmax(axis=1)[text]
        matrix[text, *entries] = np.concatenate([alignment.weight for alignment in alignments])
    return matrix


def edit_distances(first: Sequence[str], second: Sequence[str]) -> npt.NDArray[np.int32]:
    """`(len(first), len(second))` int32: Levenshtein distances of all pairs, computed in parallel.

    One step per character of the longest string of `first`. Along `second`, where every further insertion costs 1,
    the distance is a running minimum.
    """
    first_lengths, second_lengths = _lengths(first), _lengths(second)
    first_codes, second_codes = _code_points(first, first_lengths), _code_points(second, second_lengths)
    steps = np.arange(second_codes.shape[1] + 1, dtype=np.int32)
    row = np.broadcast_to(steps, (len(first), len(second), len(steps)))
    distances = np.broadcast_to(second_lengths, (len(first), len(second))).copy()
    for done, codes in enumerate(first_codes.T, start=1):
        changed = codes[:, None, None] != second_codes[None]
        best = np.empty_like(row)
        best[..., 0] = done
        np.minimum(row[..., 1:] + 1, row[..., :-1] + changed, out=best[..., 1:])
        row = np.minimum.accumulate(best - steps, axis=2) + steps
        ended = np.flatnonzero(first_lengths == done)
        distances[ended] = np.take_along_axis(row[ended], second_lengths[None, :, None], axis=2)[..., 0]
    return distances


def _text_tokens(text: str, pieces: npt.NDArray[np.int32], lower: bool) -> _Tokens:
    tokens = _Tokens([], [], [], [])
    for position, (_, start, end, role) in enumerate(pieces.tolist()):
        if role != TEXT_TOKEN:
            continue
        raw = text[start:end]
        string = raw.strip()
        if string:
            start += len(raw) - len(raw.lstrip())
            tokens.strings.append(string.lower() if lower else string)
            tokens.positions.append(position)
            tokens.starts.append(start)
            tokens.ends.append(start + len(string))
    return tokens


def _by_offset(student: _Tokens, teacher: _Tokens) -> Pairs:
    best_of_student, best_of_teacher = [(0, -1)] * len(student.positions), [(0, -1)] * len(teacher.positions)
    s = t = 0
    while s < len(best_of_student) and t < len(best_of_teacher):
        shared = min(student.ends[s], teacher.ends[t]) - max(student.starts[s], teacher.starts[t])
        if shared > best_of_student[s][0]:
            best_of_student[s] = (shared, t)
        if shared > best_of_teacher[t][0]:
            best_of_teacher[t] = (shared, s)
        if student.ends[s] < teacher.ends[t]:
            s += 1
        else:
            t += 1
    return [(s, t) for s, (_, t) in enumerate(best_of_student) if t >= 0 and best_of_teacher[t][1] == s]


def _by_type(student: _Tokens, teacher: _Tokens) -> Pairs:
    student_types, teacher_types = list(dict.fromkeys(student.strings)), list(dict.fromkeys(teacher.strings))
    # Only equal strings have distance 0, so argmin is "equal first, else the nearest".
    distances = edit_distances(student_types, teacher_types)
    to_teacher, to_student = distances.argmin(axis=1).tolist(), distances.argmin(axis=0).tolist()
    mutual = [(s, t) for s, t in enumerate(to_teacher) if to_student[t] == s]
    return [(student.strings.index(student_types[s]), teacher.strings.index(teacher_types[t])) for s, t in mutual]


def _by_position(student: _Tokens, teacher: _Tokens) -> Pairs:
    distances = _string_distances(student, teacher)
    student_lengths, teacher_lengths = _lengths(student.strings), _lengths(teacher.strings)
    # A pair of strings without a common character must not be cheaper than two unmatched tokens.
    unmatched = student_lengths[:, None] + teacher_lengths[None]
    longer = np.maximum(student_lengths[:, None], teacher_lengths[None])
    cost = np.where(distances < longer, distances, unmatched)
    skipped = np.concatenate([np.zeros(1, np.int32), np.cumsum(teacher_lengths, dtype=np.int32)])
    least = np.empty((len(student_lengths) + 1, len(teacher_lengths) + 1), dtype=np.int32)
    least[0] = skipped
    for s in range(len(student_lengths)):
        best = least[s] + student_lengths[s]
        np.minimum(best[1:], least[s, :-1] + cost[s], out=best[1:])
        least[s + 1] = np.minimum.accumulate(best - skipped) + skipped
    table, costs, pairs = least.tolist(), cost.tolist(), []
    s, t = len(student_lengths), len(teacher_lengths)
    while s and t:
        matched = costs[s - 1][t - 1]
        if matched < unmatched[s - 1, t - 1] and table[s][t] == table[s - 1][t - 1] + matched:
            s, t = s - 1, t - 1
            pairs.append((s, t))
        elif table[s][t] == table[s - 1][t] + student_lengths[s - 1]:
            s -= 1
        else:
            t -= 1
    return pairs


def _by_path(student: _Tokens, teacher: _Tokens) -> Pairs:
    """All pairs of the cheapest path; of equal steps the diagonal one, then the teacher's."""
    cost = _string_distances(teacher, student)
    least = np.empty_like(cost)
    least[0] = np.cumsum(cost[0], dtype=np.int32)
    for t in range(1, len(cost)):
        along = np.cumsum(cost[t], dtype=np.int32)
        best = least[t - 1].copy()
        np.minimum(best[1:], least[t - 1, :-1], out=best[1:])
        # Moving along the row from j to k costs along[k] - along[j]: a running minimum again.
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
    pairs += [(s, first) for first in range(t)] + [(first, t) for first in range(s)]
    return pairs


def _by_strict_path(student: _Tokens, teacher: _Tokens) -> Pairs:
    path = _by_path(student, teacher)
    student_partners = np.bincount([s for s, _ in path])
    teacher_partners = np.bincount([t for _, t in path])
    return [
        (s, t)
        for s, t in path
        if student_partners[s] == teacher_partners[t] == 1 and student.strings[s] == teacher.strings[t]
    ]


_ALIGNERS = {
    "offset": _by_offset,
    "mined_types": _by_type,
    "mined_dp": _by_position,
    "dtw_mean": _by_path,
    "dtw_strict": _by_strict_path,
}


def _string_distances(first: _Tokens, second: _Tokens) -> npt.NDArray[np.int32]:
    """`edit_distances` between all tokens, computed once per distinct string."""
    rows = {string: row for row, string in enumerate(dict.fromkeys(first.strings))}
    columns = {string: column for column, string in enumerate(dict.fromkeys(second.strings))}
    distances = edit_distances(list(rows), list(columns))
    return distances[np.ix_([rows[string] for string in first.strings], [columns[string] for string in second.strings])]


def _lengths(strings: Sequence[str]) -> npt.NDArray[np.int32]:
    return np.fromiter(map(len, strings), dtype=np.int32, count=len(strings))


def _code_points(strings: Sequence[str], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
    """`(n, longest)`: code points of each string, padded with 0."""
    longest = int(lengths.max(initial=0))
    cells = max(longest, 1)  # numpy has no strings of 0 characters
    return np.array(strings, dtype=f"U{cells}").view(np.uint32).reshape(len(strings), cells)[:, :longest]

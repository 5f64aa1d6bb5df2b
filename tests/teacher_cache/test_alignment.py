"""Alignment of two tokenizations of one text."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_cache.errors import TeacherError
from teacher_cache.tokens.alignment import METHODS, ONE_TO_ONE, Alignment, align, dense_matrices, edit_distances
from teacher_cache.tokens.request import CLOSING, OPENING, OTHER, TEXT_TOKEN

Pieces = npt.NDArray[np.int32]


def pieces(*spans: tuple[int, int], specials: bool = False) -> Pieces:
    rows = [(7, start, end, TEXT_TOKEN) for start, end in spans]
    if specials:
        rows = [(1, 0, 0, OPENING), *rows, (2, 0, 0, CLOSING)]
    return np.array(rows, dtype=np.int32).reshape(-1, 4)


def tokenized(*strings: str) -> tuple[str, Pieces]:
    """A text made of these tokens, and the tokens."""
    ends = np.cumsum([0, *map(len, strings)]).tolist()
    return "".join(strings), pieces(*pairwise(ends))


def pairs_of(alignment: Alignment) -> list[tuple[int, int]]:
    return list(zip(alignment.student.tolist(), alignment.teacher.tolist(), strict=True))


def aligned(
    student_tokens: tuple[str, ...], teacher_tokens: tuple[str, ...], method: str, *, lower: bool = False
) -> Alignment:
    text, student = tokenized(*student_tokens)
    same, teacher = tokenized(*teacher_tokens)
    assert text == same
    return align(text, teacher, student, method, lower=lower)


@cache
def levenshtein(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(levenshtein(a[1:], b) + 1, levenshtein(a, b[1:]) + 1, levenshtein(a[1:], b[1:]) + (a[0] != b[0]))


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[str, Pieces, Pieces]:
    """A text of few letters and spaces and two tokenizations; a token may include spaces."""
    text = draw(st.text(alphabet="abC ", max_size=14))

    def one() -> Pieces:
        places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
        spans = [(start, end) for start, end in pairwise(places) if draw(st.integers(0, 9))]
        return pieces(*spans, specials=draw(st.booleans()))

    return text, one(), one()


@given(st.lists(st.text(max_size=6), max_size=5), st.lists(st.text(max_size=6), max_size=5))
def test_edit_distances_are_those_of_the_recursive_definition(
    student_tokens: list[str], teacher_tokens: list[str]
) -> None:
    found = edit_distances(student_tokens, teacher_tokens)
    assert found.shape == (len(student_tokens), len(teacher_tokens))
    assert found.tolist() == [[levenshtein(a, b) for b in teacher_tokens] for a in student_tokens]


@pytest.mark.parametrize("method", METHODS)
def test_equal_tokenizations_align_every_token_with_itself(method: str) -> None:
    text = "a few words more"
    both = pieces((0, 1), (1, 5), (5, 11), (11, 16), specials=True)
    found = align(text, both, both, method, lower=False)
    assert pairs_of(found) == [(place, place) for place in range(6)]
    assert (found.weight == 1).all()


@pytest.mark.parametrize("method", METHODS)
def test_special_tokens_align_by_role_and_prompt_tokens_do_not_align(method: str) -> None:
    # Teacher: a prompt of two tokens, "sea", and a closing token. Student: [CLS] sea [SEP].
    teacher = np.array([[9, 0, 0, OTHER], [9, 0, 0, OTHER], [4, 0, 3, TEXT_TOKEN], [2, 0, 0, CLOSING]], np.int32)
    assert pairs_of(align("sea", teacher, pieces((0, 3), specials=True), method, lower=False)) == [(1, 2), (2, 3)]


@pytest.mark.parametrize("method", METHODS)
def test_white_space_and_case_do_not_prevent_alignment(method: str) -> None:
    # "▁The" "▁sea" against "the" "sea", with a lone "▁" in between that is not aligned.
    teacher, student = pieces((0, 3), (3, 4), (4, 8)), pieces((0, 3), (5, 8))
    assert pairs_of(align("The  sea", teacher, student, method, lower=True)) == [(0, 0), (1, 2)]
    strict = align("The  sea", teacher, student, "dtw_strict", lower=False)
    assert pairs_of(strict) == [(0, 0), (1, 2)]


def test_strict_pairs_need_equal_case_if_the_student_is_cased() -> None:
    text = "AB"
    same = align(text, pieces((0, 2)), pieces((0, 2)), "dtw_strict", lower=False)
    assert pairs_of(same) == [(0, 0)]
    # Another text's token: the strings differ only in case.
    other = align("ABab", pieces((0, 2)), pieces((2, 4)), "dtw_strict", lower=False)
    assert pairs_of(other) == []
    assert pairs_of(align("ABab", pieces((0, 2)), pieces((2, 4)), "dtw_strict", lower=True)) == [(0, 0)]


@pytest.mark.parametrize("method", METHODS)
def test_a_text_without_tokens_on_one_side_has_an_empty_alignment(method: str) -> None:
    found = align("sea", pieces((0, 3)), pieces(), method, lower=False)
    assert len(found.student) == len(found.teacher) == len(found.weight) == 0


def test_offset_pairs_tokens_that_share_most_with_each_other() -> None:
    # un|believ|able against unbeliev|able: "unbeliev" shares 6 with "believ" and 2 with "un".
    assert pairs_of(aligned(("unbeliev", "able"), ("un", "believ", "able"), "offset")) == [(0, 1), (1, 2)]


def test_offset_pairs_are_mutual_and_the_first_of_equals() -> None:
    # The teacher's one token shares 2 with each of three: the first is paired, the others are not.
    assert pairs_of(aligned(("ab", "cd", "ef"), ("abcdef",), "offset")) == [(0, 0)]
    # "abc"|"d" and "a"|"bcd": "abc" and "bcd" choose each other.
    assert pairs_of(aligned(("abc", "d"), ("a", "bcd"), "offset")) == [(0, 1)]


def test_offset_takes_the_first_of_several_tokens_of_one_character() -> None:
    # A byte-level teacher splits one character into three tokens that all cover it.
    assert pairs_of(
        align("日本", pieces((0, 1), (0, 1), (0, 1), (1, 2)), pieces((0, 1), (1, 2)), "offset", lower=False)
    ) == [
        (0, 0),
        (1, 3),
    ]


def test_mined_types_align_only_the_first_occurrence_of_a_string() -> None:
    found = aligned(("the", "cat", "the", "dog"), ("the", "cat", "the", "dog"), "mined_types")
    assert pairs_of(found) == [(0, 0), (1, 1), (3, 3)]


def test_mined_types_pair_the_nearest_strings_if_mutual() -> None:
    # "river" has distance 2 to "riv" and 5 to "er": riv takes it, and river takes riv.
    assert pairs_of(aligned(("river", "bed"), ("riv", "er", "bed"), "mined_types")) == [(0, 0), (1, 2)]


def test_mined_types_can_pair_distant_tokens_and_offset_cannot() -> None:
    # The student's second "ab" is the teacher's last token by place, its first by string.
    student_tokens, teacher_tokens = ("ab", "c", "abd"), ("abc", "ab", "d")
    assert (0, 1) in pairs_of(aligned(student_tokens, teacher_tokens, "mined_types"))
    assert (0, 1) not in pairs_of(aligned(student_tokens, teacher_tokens, "offset"))


def test_mined_dp_has_the_fewest_edits() -> None:
    # river~riv 2 edits, "er" unmatched 2, bed = bed: 4. The other way, river~er: 3 edits and "riv" 3.
    assert pairs_of(aligned(("river", "bed"), ("riv", "er", "bed"), "mined_dp")) == [(0, 0), (1, 2)]


def test_mined_dp_never_pairs_strings_without_a_common_character() -> None:
    assert pairs_of(align("abcd", pieces((0, 2)), pieces((2, 4)), "mined_dp", lower=False)) == []


def test_dtw_mean_averages_the_teacher_tokens_on_the_path() -> None:
    found = aligned(("river", "stones"), ("riv", "er", "stones"), "dtw_mean")
    assert pairs_of(found) == [(0, 0), (0, 1), (1, 2)]
    assert found.weight.tolist() == [0.5, 0.5, 1.0]
    spread = aligned(("riv", "er", "stones"), ("river", "stones"), "dtw_mean")
    assert pairs_of(spread) == [(0, 0), (1, 0), (2, 1)]
    assert spread.weight.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("method", ["mined_dp", "dtw_mean", "dtw_strict"])
def test_of_equally_cheap_steps_the_diagonal_one_is_taken(method: str) -> None:
    # Every pair of these costs nothing.
    assert pairs_of(aligned(("a", "a", "a"), ("a", "a", "a"), method)) == [(0, 0), (1, 1), (2, 2)]


def test_dtw_strict_keeps_pairs_of_equal_strings_without_other_partners() -> None:
    assert pairs_of(aligned(("river", "stones"), ("riv", "er", "stones"), "dtw_strict")) == [(1, 2)]
    # "a" equals "a", but the path gives it a second partner: neither pair is kept.
    found = align("a b", pieces((0, 1), (2, 3)), pieces((0, 1)), "dtw_strict", lower=False)
    assert pairs_of(found) == []


@given(two_cuts())
def test_the_path_is_one_of_the_cheapest_and_runs_from_corner_to_corner(case: tuple[str, Pieces, Pieces]) -> None:
    text, student, teacher = case
    student_strings, teacher_strings = strings(text, student), strings(text, teacher)
    found = align(text, teacher, student, "dtw_mean", lower=False)
    path = [(s, t) for s, t in pairs_of(found) if student[s, 3] == TEXT_TOKEN]
    if not student_strings or not teacher_strings:
        assert path == []
        return

    @cache
    def least(s: int, t: int) -> int:
        if s < 0 or t < 0:
            return 0 if s == t == -1 else 10**9
        cost = levenshtein(list(student_strings.values())[s], list(teacher_strings.values())[t])
        return cost + min(least(s - 1, t - 1), least(s - 1, t), least(s, t - 1))

    places = [(list(student_strings).index(s), list(teacher_strings).index(t)) for s, t in path]
    assert (places[0], places[-1]) == ((0, 0), (len(student_strings) - 1, len(teacher_strings) - 1))
    assert all(
        (after[0] - before[0], after[1] - before[1]) in {(0, 1), (1, 0), (1, 1)} for before, after in pairwise(places)
    )
    assert sum(levenshtein(student_strings[s], teacher_strings[t]) for s, t in path) == least(
        len(student_strings) - 1, len(teacher_strings) - 1
    )


@given(two_cuts())
def test_mined_dp_has_the_least_cost_of_all_monotone_matchings(case: tuple[str, Pieces, Pieces]) -> None:
    text, student, teacher = case
    student_strings, teacher_strings = strings(text, student), strings(text, teacher)
    pairs = [
        (s, t)
        for s, t in pairs_of(align(text, teacher, student, "mined_dp", lower=False))
        if student[s, 3] == TEXT_TOKEN
    ]
    student_tokens, teacher_tokens = list(student_strings.values()), list(teacher_strings.values())

    @cache
    def least(s: int, t: int) -> int:
        if s == 0 or t == 0:
            return sum(map(len, student_tokens[:s])) + sum(map(len, teacher_tokens[:t]))
        a, b = student_tokens[s - 1], teacher_tokens[t - 1]
        options = [least(s - 1, t) + len(a), least(s, t - 1) + len(b)]
        if levenshtein(a, b) < max(len(a), len(b)):
            options.append(least(s - 1, t - 1) + levenshtein(a, b))
        return min(options)

    assert all(s < u and t < v for (s, t), (u, v) in pairwise(pairs))
    without = sum(len(student_strings[s]) for s in student_strings.keys() - {s for s, _ in pairs})
    without += sum(len(teacher_strings[t]) for t in teacher_strings.keys() - {t for _, t in pairs})
    assert without + sum(levenshtein(student_strings[s], teacher_strings[t]) for s, t in pairs) == least(
        len(student_tokens), len(teacher_tokens)
    )


@given(two_cuts(), st.sampled_from(METHODS), st.booleans())
def test_weights_of_a_token_sum_to_1_and_tokens_are_paired_once(
    case: tuple[str, Pieces, Pieces], method: str, lower: bool
) -> None:
    text, student, teacher = case
    found = align(text, teacher, student, method, lower=lower)
    masks = [np.arange(9)[None] < len(side) for side in (student, teacher)]
    matrix = dense_matrices([found], masks[0], masks[1])[0]
    assert not matrix[len(student) :].any()
    assert not matrix[:, len(teacher) :].any()
    matrix = matrix[: len(student)]
    assert matrix.dtype == np.float32
    rows = matrix.sum(axis=1)
    assert np.allclose(rows[found.student], 1)
    assert rows.sum() == pytest.approx(len(set(found.student.tolist())))
    if method in ONE_TO_ONE:
        assert (found.weight == 1).all()
        assert matrix.sum(axis=0).max(initial=0) <= 1


def strings(text: str, side: Pieces) -> dict[int, str]:
    """Position -> characters of the tokens that have any."""
    found = {place: text[start:end].strip() for place, (_, start, end, _) in enumerate(side.tolist())}
    return {place: string for place, string in found.items() if string}


def test_matrices_of_a_batch_follow_the_padding() -> None:
    one, two = np.array([0, 1], np.int32), np.array([0], np.int32)
    batch = [Alignment(one, one, np.ones(2, np.float32)), Alignment(two, two, np.ones(1, np.float32))]
    student = np.array([[True, True, False], [True, False, False]])
    right = np.array([[True, True, False, False], [True, False, False, False]])
    assert np.argwhere(dense_matrices(batch, student, right)).tolist() == [[0, 0, 0], [0, 1, 1], [1, 0, 0]]
    left = right[:, ::-1]
    assert np.argwhere(dense_matrices(batch, student, left)).tolist() == [[0, 0, 2], [0, 1, 3], [1, 0, 3]]
    assert np.argwhere(dense_matrices(batch, student[:, ::-1], left)).tolist() == [[0, 1, 2], [0, 2, 3], [1, 2, 3]]
    assert dense_matrices([], np.zeros((0, 3), np.bool_), np.zeros((0, 4), np.bool_)).shape == (0, 3, 4)


def test_an_unknown_method_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(TeacherError, match="unknown alignment 'nearest'; expected one of offset, mined_types"):
        align("a", pieces((0, 1)), pieces((0, 1)), "nearest", lower=False)


def test_a_real_tokenizer_is_aligned_with_single_characters(minilm: Path) -> None:
    from transformers import AutoTokenizer

    from teacher_cache.teachers.token_offsets import tokenize_with_offsets

    text = "Unbelievably quiet harbours"
    (student,) = tokenize_with_offsets(AutoTokenizer.from_pretrained(minilm), [text])
    letters = pieces(*((place, place + 1) for place in range(len(text))), specials=True)
    found = align(text, letters, student, "offset", lower=True)
    # Each word is paired with its first letter, special tokens with special tokens.
    assert [text[letters[t, 1] : letters[t, 2]] for t in found.teacher.tolist()][1:-1] == [
        text[start] for _, start, _, role in student.tolist() if role == TEXT_TOKEN
    ]
    assert pairs_of(found)[0] == (0, 0)
    assert pairs_of(found)[-1] == (len(student) - 1, len(letters) - 1)

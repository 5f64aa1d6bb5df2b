"""Share of the student's tokens that are aligned to tokens of a teacher, and the time to align them, by method.

    python benchmarks/alignment.py CORPUS --teacher FOLDER --student FOLDER [--prompt P] [--quick] [--json FILE]

Loads only the tokenizers of both folders. For every method, over the distinct texts of the corpus:

- student, teacher: share of aligned tokens, with special tokens and without those of a prompt.
- of fewer: aligned tokens over the tokens of the side with fewer, text by text; EMO claims 75 %.
- equal: pairs of text tokens that are the same string, in lower case if the student ignores case.
- ms: time to align one text; the time of the tokenizers is printed above.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from teacher_cache.building.align import STUDENT_LENGTH
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.teachers.token_offsets import ignores_case, tokenize_with_offsets
from teacher_cache.tokens.alignment import METHODS, Alignment, align
from teacher_cache.tokens.request import OTHER, ROLE, TEXT_TOKEN

Pieces = list[npt.NDArray[np.int32]]
QUICK_TEXTS = 2000
TEACHER_LENGTH = 512


def main(arguments: list[str] | None = None) -> None:
    args = _arguments(arguments)
    from transformers import AutoTokenizer

    teacher = AutoTokenizer.from_pretrained(args.teacher, local_files_only=True)
    student = AutoTokenizer.from_pretrained(args.student, local_files_only=True)
    texts = distinct_texts(args.corpus, args.text_key, QUICK_TEXTS if args.quick else None)
    teacher_pieces, teacher_ms = _tokenized(teacher, texts, args.prompt, TEACHER_LENGTH)
    student_pieces, student_ms = _tokenized(student, texts, "", STUDENT_LENGTH)
    lower = ignores_case(student)
    found: dict[str, Any] = {
        "texts": len(texts),
        "student_tokens": float(np.mean([len(pieces) for pieces in student_pieces])),
        "teacher_tokens": float(np.mean([len(pieces) for pieces in teacher_pieces])),
        "tokenizer_ms": {"student": student_ms, "teacher": teacher_ms},
        "methods": {method: measure(method, texts, teacher_pieces, student_pieces, lower) for method in METHODS},
    }
    print(
        f"{found['texts']:,} distinct texts, tokens per text: student {found['student_tokens']:.1f}, teacher "
        f"{found['teacher_tokens']:.1f}; tokenizing one takes {student_ms:.3f} and {teacher_ms:.3f} ms"
    )
    print(f"{'method':12} {'student':>8} {'teacher':>8} {'of fewer':>9} {'equal':>7} {'ms':>7}")
    for method, figures in found["methods"].items():
        print(
            f"{method:12} {figures['student']:8.1%} {figures['teacher']:8.1%} {figures['of_fewer']:9.1%} "
            f"{figures['equal']:7.1%} {figures['ms']:7.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    offset, types = (found["methods"][method]["of_fewer"] for method in ("offset", "mined_types"))
    print(f"mapped one to one, of the side with fewer tokens: {offset:.1%} by offsets, {types:.1%} by strings")


def distinct_texts(corpus: Path, text_key: str, most: int | None) -> list[str]:
    """Distinct texts of a corpus file in order of first appearance; if there are more than `most`, every n-th."""
    found: dict[str, None] = {}
    for records in Corpus.open(corpus, text_key=text_key).batches(8192):
        found.update((record[0], None) for record in records)
    texts = list(found)
    return texts if most is None else texts[:: max(1, len(texts) // most)]


def measure(
    method: str, texts: list[str], teacher_pieces: Pieces, student_pieces: Pieces, lower: bool
) -> dict[str, float]:
    """The figures of one method, see above."""
    started = time.perf_counter()
    found = [
        align(text, teacher, student, method, lower=lower)
        for text, teacher, student in zip(texts, teacher_pieces, student_pieces, strict=True)
    ]
    seconds = time.perf_counter() - started
    student_counts, teacher_counts = _counts(student_pieces), _counts(teacher_pieces)
    students = np.array([len(set(one.student.tolist())) for one in found])
    teachers = np.array([len(set(one.teacher.tolist())) for one in found])
    equal, pairs = 0, 0
    for text, one, student, teacher in zip(texts, found, student_pieces, teacher_pieces, strict=True):
        same = _equal_strings(text, one, student, teacher, lower)
        equal, pairs = equal + sum(same), pairs + len(same)
    return {
        "student": float(students.sum() / student_counts.sum()),
        "teacher": float(teachers.sum() / teacher_counts.sum()),
        "of_fewer": float(np.minimum(students, teachers).sum() / np.minimum(student_counts, teacher_counts).sum()),
        "equal": equal / max(1, pairs),
        "ms": 1e3 * seconds / len(texts),
    }


def _equal_strings(
    text: str, found: Alignment, student: npt.NDArray[np.int32], teacher: npt.NDArray[np.int32], lower: bool
) -> list[bool]:
    same = []
    for s, t in zip(found.student.tolist(), found.teacher.tolist(), strict=True):
        if student[s, ROLE] == TEXT_TOKEN:
            one, two = (text[start:end].strip() for start, end in (student[s, 1:3], teacher[t, 1:3]))
            same.append(one.lower() == two.lower() if lower else one == two)
    return same


def _counts(pieces: Pieces) -> npt.NDArray[np.int64]:
    return np.array([(one[:, ROLE] != OTHER).sum() for one in pieces])


def _tokenized(tokenizer: Any, texts: list[str], prompt: str, length: int) -> tuple[Pieces, float]:
    started = time.perf_counter()
    pieces = tokenize_with_offsets(tokenizer, texts, prompt=prompt, max_length=length)
    return pieces, 1e3 * (time.perf_counter() - started) / len(texts)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--prompt", default="", help="prompt of the teacher")
    parser.add_argument("--text-key", default="text")
    parser.add_argument("--quick", action="store_true", help=f"about {QUICK_TEXTS} texts")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()

"""Two tasks over sentences of the tiny student's vocabulary."""

import csv
from pathlib import Path

from tests.conftest import varied_texts

TASKS = ["stsb", "mrpc"]


def write_tasks(folder: Path, seed: int = 1) -> Path:
    folder.mkdir()
    texts = varied_texts(60, seed)
    for name, column, values in (
        ("stsb", "score", [place % 6 for place in range(30)]),
        ("mrpc", "label", [place % 2 for place in range(30)]),
    ):
        with (folder / f"{name}_test.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sentence1", "sentence2", column])
            writer.writerows(zip(texts[:30], texts[30:], values, strict=True))
    return folder

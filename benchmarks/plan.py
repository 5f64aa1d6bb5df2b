"""Peak memory that `distill plan` estimates and that training really uses, on this CPU.

Each setting trains a few steps of the real trainer in a new process: random texts of an exact length, random teacher
vectors, the real student. Both figures are bytes beyond the model. Measured is the rise of resident memory over its
value before the student was loaded, less the bytes of weights and heads (pages of a loaded file become resident only
when they are used, so that resident memory after loading is no measure). Estimated is the plan's peak without weights
and heads. A small step before it makes the libraries' code resident, 50 MB, which is not part of the estimate.
glibc is set to return blocks over 64 KiB to the system when they are freed (MALLOC_MMAP_THRESHOLD_): otherwise the
peak would include what the heap keeps, which depends on the order of frees.

    python -m benchmarks.plan --students MODELS_FOLDER
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TEACHER, TEACHER_DIM = "shape:bge-m3", 1024
MMAP_THRESHOLD = 2**16


@dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        student: a folder below `--students`, or its sizes where that is not there.
    """

    student: str
    sizes: str
    precision: str
    batch: int
    length: int
    method: str
    memory: str = "default"

    @property
    def name(self) -> str:
        low = ", memory low" if self.memory == "low" else ""
        return f"{self.student} {self.precision} {self.batch} x {self.length} {self.method}{low}"


L6, L3 = ("all-MiniLM-L6-v2", "shape:minilm-l6-h384"), ("paraphrase-MiniLM-L3-v2", "shape:minilm-l3-h384")
MPNET = ("all-mpnet-base-v2", "shape:mpnet-base")
SETTINGS = (
    Setting(*L6, "fp32", 32, 64, "talas+none"),
    Setting(*L6, "bf16", 32, 64, "talas+asam"),
    Setting(*L6, "fp32", 16, 128, "talas+norm-only"),
    Setting(*L3, "fp32", 64, 32, "talas+asam"),
    Setting(*MPNET, "bf16", 8, 32, "talas+none"),
    Setting(*L6, "fp32", 32, 96, "talas+norm-only", "low"),
)


@dataclass(frozen=True)
class Compared:
    """Bytes beyond the loaded model."""

    setting: str
    estimated: int
    measured: int
    seconds: float

    @property
    def deviation(self) -> float:
        return self.estimated / self.measured - 1


def compare(setting: Setting, students: Path | None, steps: int) -> Compared:
    """One setting, estimated and measured."""
    from distill.bench.settings import BenchSettings
    from distill.bench.workloads import workloads
    from distill.plan.models import student_model
    from distill.plan.step import trace
    from distill.training.targets import Targets
    from teacher_cache.table.cache import TeacherCache

    folder = None if students is None else students / setting.student
    student = str(folder) if folder is not None and folder.is_dir() else setting.sizes
    settings = BenchSettings(
        student=student,
        random_weights=TEACHER,
        methods=(setting.method,),
        lengths=(setting.length,),
        batch_size=setting.batch,
        precision=setting.precision,
        memory=setting.memory,
        steps=steps,
        warm_up=0,
    )
    (method,) = settings.rows()
    with workloads(settings) as (workload,):
        config = workload.configure(method.configure(settings.run_config()), online=False)
        start = time.perf_counter()
        with TeacherCache.open(config.cache) as cache:
            shape = Targets(config, cache).shape
        lengths = [setting.length] * setting.batch
        found = trace(config, student_model(config.student), shape, lengths, device="cpu", precision=setting.precision)
        seconds = time.perf_counter() - start
        peak = _measured(config)
    model = found.breakdown["weights"] + found.breakdown["heads"]
    return Compared(setting.name, found.peak - model, peak - model, seconds)


def _measured(config: Any) -> int:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD)
    os.environ["MALLOC_TRIM_THRESHOLD_"] = str(MMAP_THRESHOLD)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_train, config).result()


def _train(config: Any) -> int:
    """Bytes that a training takes at its peak, its model included, in a process that has taken one small step."""
    from distill.bench.timed_run import measure_run

    measure_run(replace(config, training=replace(config.training, per_device_train_batch_size=2, max_steps=1)), 0)
    return measure_run(config, 0).peak


def results(students: Path | None, quick: bool) -> Iterator[Compared]:
    for setting in SETTINGS[:2] if quick else SETTINGS:
        yield compare(setting, students, steps=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--students", type=Path, help="folder of student models; without it, random weights")
    parser.add_argument("--quick", action="store_true", help="two settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()
    rows = []
    for row in results(arguments.students, arguments.quick):
        rows.append(row)
        print(
            f"{row.setting}: estimated {row.estimated / 1e6:,.0f} MB in {row.seconds:.1f} s, measured "
            f"{row.measured / 1e6:,.0f} MB, {row.deviation:+.1%}",
            flush=True,
        )
    largest = max(rows, key=lambda row: abs(row.deviation))
    if arguments.json:
        record = [asdict(row) | {"deviation": row.deviation} for row in rows]
        arguments.json.write_text(json.dumps({"settings": record, "largest": largest.deviation}, indent=2))
    print(f"largest deviation: {largest.deviation:+.1%} ({largest.setting})")


if __name__ == "__main__":
    main()

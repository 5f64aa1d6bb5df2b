"""Step time with cached token columns and with an online teacher, and whether both have equal losses.

    python benchmarks/token_targets.py --teacher FOLDER --student FOLDER --corpus FILE [--methods emo,dskd,cdm,talas]
        [--steps 100] [--texts 2048] [--storage float16] [--wider 1024x24 ...] [--memory] [--quick] [--json FILE]

Two students start with the same weights and see the same texts in the same order under the same dropout masks; one
reads the teacher's outputs from the cache, the other one's teacher encodes them. Steps alternate between the two, and
so does which one goes first. A step is the batch (records, alignments, teacher outputs), forward, backward and AdamW.

Times are medians, and the ratio is the median of the steps' ratios. "Losses" are both losses at the weights of the
cached student: the effect of storing. "Curves" are the losses of the two students, each at its own weights. If the
losses of the given teacher differ by more than the encoding explains, the exit status is 1.

`--wider HIDDENxLAYERS` repeats it, in fewer steps, with larger random teachers of the same class. Methods that compare
vectors only are listed for comparison. `--memory` runs each side in a new process. `--quick` without folders creates
small random models.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from accelerate.utils import send_to_device
from transformers.utils import logging

from benchmarks.resources import bytes_below
from benchmarks.token_models import SEED, checked_size, made_up, parameters_of, write_texts, write_wider
from distill.config import DataConfig, ObjectiveConfig, RunConfig, StudentConfig, TeacherConfig, TrainingConfig
from distill.data.dataset import ShuffledDataset
from distill.data.sampler import StreamingSampler
from distill.objectives import load_objective
from distill.objectives.base import Objective, StudentShape, TeacherShape
from distill.student.student import Student
from distill.training.assembly import Assembly
from distill.training.measurement import peak_memory, reset_peak_memory
from distill.training.trainer import Distillation
from teacher_cache.building.build import BuildReport, build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions, resolve, token_shape
from teacher_cache.tokens.request import TokenRequest

METHODS = ("emo", "dskd", "cdm", "talas")
MODES = ("cached", "online")
WINDOW = 1024
# Steps at the start that are not timed.
WARM_UP = 2
# Sizes of wider teachers.
WIDER_STEPS = 8
MEMORY_STEPS = 10
# Largest relative difference of the losses. float16 changes a number by 2^-11 of itself at most; the steps of int8 are
# coarser, and their errors cancel.
TOLERANCES = {"float16": 2.0**-11, "float16-raw": 2.0**-11, "int8": 2e-3}
# For a teacher in half precision, whose rounding depends on the padding of a batch.
BFLOAT16_TOLERANCE = 2.0**-8

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The settings of both sides.

    Attributes:
        precision: of the student, "fp32" or "bf16".
        dtype: of the teacher.
        storage: of token states.
    """

    cache: Path
    teacher: Path
    student: Path
    batch: int
    device: str
    precision: str
    dtype: str
    storage: str

    @property
    def tolerance(self) -> float:
        of_format = TOLERANCES[self.storage]
        return of_format if self.dtype == "float32" else max(of_format, BFLOAT16_TOLERANCE)


class Side:
    """One student in training.

    Args:
        mode: "cached" or "online".
    """

    def __init__(self, mode: str, method: str, setting: Setting, cache: TeacherCache) -> None:
        online = TeacherConfig(mode, str(setting.teacher), setting.device)
        config = RunConfig(
            cache=str(setting.cache),
            teacher=online if mode == "online" else TeacherConfig(),
            student=StudentConfig(str(setting.student)),
            objective=ObjectiveConfig(method),
            data=DataConfig(window=WINDOW, held_out=0),
            training=TrainingConfig(per_device_train_batch_size=setting.batch, seed=SEED),
        )
        config.check()
        parts = Assembly.load(config, cache)
        student, objective, dataset = parts.student, parts.objective, parts.dataset()
        order = WindowedShuffle(len(dataset), setting.batch, window=WINDOW, seed=SEED)
        self.setting = setting
        self.dataset = ShuffledDataset(dataset, order)
        self.collate = parts.collator()
        self.model = Distillation(student, objective).to(setting.device).train()
        self.parameters = sum(parameter.numel() for parameter in student.parameters())
        training = config.training
        groups = [
            {"params": list(student.parameters()), "lr": training.learning_rate},
            {"params": list(objective.parameters()), "lr": training.head_learning_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=training.weight_decay)
        self._positions = self._batches(order)

    @staticmethod
    def _batches(order: WindowedShuffle) -> Iterator[list[int]]:
        sampler = StreamingSampler(order, drop_last=True)
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from sampler

    def fetch(self) -> Any:
        """The next batch, on the student's device."""
        records = self.dataset.__getitems__(next(self._positions))
        return send_to_device(self.collate(records), self.setting.device)

    def forward(self, batch: Any, seed: int) -> dict[str, Any]:
        """Loss and terms; equal seeds give equal dropout masks."""
        torch.manual_seed(seed)
        with torch.autocast(self.setting.device, torch.bfloat16, enabled=self.setting.precision == "bf16"):
            found: dict[str, Any] = self.model(**batch)
        return found

    def learn(self, batch: Any, seed: int) -> dict[str, Any]:
        found = self.forward(batch, seed)
        found["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def close(self) -> None:
        self.dataset.close()


def made(method: str, student: StudentShape, teacher: TeacherShape) -> Objective:
    kind: Any = load_objective(method)
    objective: Objective = kind(student, teacher)
    return objective


def step_by_step(method: str, setting: Setting, steps: int) -> Figures:
    """Both sides of one method, interleaved."""
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    losses: dict[str, list[dict[str, float]]] = {mode: [] for mode in (*MODES, "encoded")}
    with TeacherCache.open(setting.cache) as cache:
        sides = {mode: Side(mode, method, setting, cache) for mode in MODES}
        for number in range(WARM_UP + steps):
            turns = MODES if number % 2 else MODES[::-1]
            batches, fetched = {}, {}
            for mode in turns:
                started = now(setting.device)
                batches[mode] = sides[mode].fetch()
                fetched[mode] = now(setting.device) - started
            # With gradients: without them other kernels may run.
            losses["encoded"].append(plain(sides["cached"].forward(batches["online"], number)))
            for mode in turns:
                started = now(setting.device)
                found = sides[mode].learn(batches[mode], number)
                taken = now(setting.device) - started
                losses[mode].append(plain(found))
                if number >= WARM_UP:
                    times[mode].append((fetched[mode], taken))
        for side in sides.values():
            side.close()
    wholes = {mode: [batch + student for batch, student in times[mode]] for mode in MODES}
    return {
        "steps": steps,
        "tokens": bool(sides["cached"].model.objective.needs.tokens),
        "ratio": statistics.median(
            cached / online for cached, online in zip(wholes["cached"], wholes["online"], strict=True)
        ),
        **{
            mode: {
                "step_ms": 1e3 * statistics.median(wholes[mode]),
                "mean_step_ms": 1e3 * statistics.mean(wholes[mode]),
                "batch_ms": 1e3 * statistics.median(batch for batch, _ in times[mode]),
                "student_ms": 1e3 * statistics.median(student for _, student in times[mode]),
            }
            for mode in MODES
        },
        "losses_differ": largest_difference(losses["cached"], losses["encoded"], "loss"),
        "curves_differ": largest_difference(losses["cached"], losses["online"], "loss"),
        "terms_differ": {
            term: largest_difference(losses["cached"], losses["encoded"], term)
            for term in losses["cached"][0]
            if term != "loss"
        },
        "last_loss": {mode: losses[mode][-1]["loss"] for mode in MODES},
    }


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def plain(found: dict[str, Any]) -> dict[str, float]:
    return {"loss": found["loss"].item(), **{name: term.item() for name, term in found["terms"].items()}}


def largest_difference(mine: list[dict[str, float]], theirs: list[dict[str, float]], name: str) -> float:
    """Largest relative difference of one term over all steps."""
    return max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-30) for a, b in zip(mine, theirs, strict=True))


def peak_alone(mode: str, method: str, setting: Setting, steps: int) -> int:
    """Highest resident memory of some steps of one side in this process, in bytes."""
    reset_peak_memory()
    with TeacherCache.open(setting.cache) as cache:
        side = Side(mode, method, setting, cache)
        for number in range(steps):
            side.learn(side.fetch(), number)
        side.close()
    return peak_memory()


def peaks(method: str, setting: Setting, steps: int) -> dict[str, int]:
    found = {}
    for mode in MODES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[mode] = pool.submit(peak_alone, mode, method, setting, steps).result()
    return found


def attention_layers(methods: tuple[str, ...], teacher: Path, student: Path) -> tuple[int, ...] | None:
    """Teacher layers whose attention the methods compare; None for none."""
    shape = token_shape(resolve(TeacherOptions(model=str(teacher))))
    known = TeacherShape(
        shape.width, token_dim=shape.width, layers=shape.layers, heads=shape.heads, causal=shape.causal
    )
    of_student = Student.load(StudentConfig(str(student))).shape
    needs = [made(method, of_student, known).needs for method in methods]
    layers = {layer for need in needs for _, layer in need.attention}
    if not layers and any(need.importance for need in needs):
        layers = {shape.layers}
    return tuple(sorted(layers)) or None


def build_columns(setting: Setting, texts: Path, methods: tuple[str, ...]) -> BuildReport:
    options = TeacherOptions(model=str(setting.teacher), dtype=setting.dtype, device=setting.device)
    tokens = TokenRequest(attention_layers(methods, setting.teacher, setting.student))
    return build(Corpus.open(texts), options, setting.cache, name="texts", tokens=tokens, token_storage=setting.storage)


def against(setting: Setting, texts: Path, methods: tuple[str, ...], steps: int, memory: bool = False) -> Figures:
    """Column sizes of one teacher, and the results of the methods."""
    built = build_columns(setting, texts, methods)
    arrays = setting.cache / "spaces" / built.space
    sizes = {
        path.name.removesuffix(".zarr"): bytes_below(path) / built.distinct for path in sorted(arrays.glob("*.zarr"))
    }
    found: Figures = {
        "teacher": setting.teacher.name,
        "parameters": parameters_of(setting.teacher),
        "texts": built.distinct,
        "tokens_per_text": built.tokens / built.encoded,
        "bytes_per_text": sizes,
        "methods": {},
    }
    print_figures(found)
    for method in methods:
        found["methods"][method] = of_method = step_by_step(method, setting, steps)
        if memory:
            of_method["peak_bytes"] = peaks(method, setting, min(steps, MEMORY_STEPS))
        say_method(method, of_method)
    return found


def print_figures(found: Figures) -> None:
    sizes = ", ".join(f"{name} {size:,.0f}" for name, size in found["bytes_per_text"].items())
    print(
        f"teacher {found['teacher']}: {found['parameters'] / 1e6:.1f} million parameters; {found['texts']:,} texts of "
        f"{found['tokens_per_text']:.1f} tokens; bytes per text: {sizes}",
        flush=True,
    )


def say_method(method: str, found: Figures) -> None:
    sides = [
        f"{mode} {of['step_ms']:.1f} ms (batch {of['batch_ms']:.1f}, student {of['student_ms']:.1f})"
        for mode, of in ((mode, found[mode]) for mode in MODES)
    ]
    memory = "".join(f"; {mode} peak {size / 2**20:,.0f} MiB" for mode, size in found.get("peak_bytes", {}).items())
    print(
        f"  {method}: {', '.join(sides)}, ratio {found['ratio']:.2f}; losses differ by at most "
        f"{found['losses_differ']:.1e}, curves by {found['curves_differ']:.1e}{memory}",
        flush=True,
    )


def figure(found: Figures) -> str:
    by_token = [(name, of) for name, of in found["methods"].items() if of["tokens"]]
    return ", ".join(f"{name} {of['ratio']:.2f}" for name, of in by_token or found["methods"].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="model folder")
    parser.add_argument("--student", type=Path, help="model folder")
    parser.add_argument("--corpus", type=Path, help="a file of texts")
    parser.add_argument("--methods", type=lambda names: tuple(names.split(",")), default=METHODS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--wider", nargs="*", default=[], type=checked_size, metavar="HIDDENxLAYERS")
    parser.add_argument("--dtype", default="float32", help="of the teacher: float32, bfloat16 or auto")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), help="of the student")
    parser.add_argument("--storage", default="float16", choices=TOLERANCES, help="of token states")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", action="store_true", help="peak memory of each side, in a new process")
    parser.add_argument("--quick", action="store_true", help="4 steps, 64 texts in batches of 8")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folders = (given.teacher, given.student, given.corpus)
    if any(folder is None for folder in folders) and (not given.quick or any(folders)):
        parser.error("--teacher, --student and --corpus are needed; without any of them, --quick makes its own")
    steps, texts, batch = (4, 64, 8) if given.quick else (given.steps, given.texts, given.batch)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        teacher, student, corpus = made_up(root) if given.teacher is None else folders
        write_texts(corpus, root / "all.jsonl", texts)
        setting = Setting(
            root / "cache", teacher, student, batch, given.device, given.precision, given.dtype, given.storage
        )
        results: Figures = {
            "threads": torch.get_num_threads(),
            "batch": batch,
            "dtype": given.dtype,
            "precision": given.precision,
            "storage": given.storage,
            "device": given.device,
            "tolerance": setting.tolerance,
            "student": {"name": student.name, "parameters": parameters_of(student)},
        }
        print(
            f"{results['threads']} threads, batches of {batch} texts, student {student.name}: "
            f"{results['student']['parameters'] / 1e6:.1f} million parameters",
            flush=True,
        )
        results["teachers"] = [against(setting, root / "all.jsonl", given.methods, steps, given.memory)]
        fewer = min(steps, WIDER_STEPS)
        write_texts(corpus, root / "some.jsonl", (WARM_UP + fewer) * batch)
        for size in given.wider:
            larger = replace(setting, teacher=write_wider(teacher, size, root / size), cache=root / f"cache-{size}")
            results["teachers"].append(against(larger, root / "some.jsonl", given.methods, fewer))
    of_teacher = results["teachers"][0]["methods"]
    apart = [name for name, found in of_teacher.items() if found["losses_differ"] > setting.tolerance]
    results["agree"] = not apart
    if given.json:
        given.json.write_text(json.dumps(results, indent=2))
    for found in results["teachers"][1:]:
        print(f"cached step / online step, {found['teacher']}: {figure(found)}")
    if apart:
        print(f"losses differ by more than {setting.tolerance:.1e}: {', '.join(apart)}")
    print(f"cached step / online step: {figure(results['teachers'][0])}")
    if apart:
        sys.exit(1)


if __name__ == "__main__":
    main()

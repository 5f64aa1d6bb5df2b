"""`distill plan`: estimate a training before it starts."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common import common_options, duration, emit, print_status, progress_bar, size
from cli.options import PATH, corpus_option, default_cache_if_any, recipe_option, set_option, space_option

if TYPE_CHECKING:
    from distill.plan.estimate import Plan

# Flags that are settings of a run under another name.
KEYS = {
    "recipe": "recipe",
    "student": "student.model",
    "objective": "objective.name",
    "sharpness": "sharpness.name",
    "batch_size": "training.per_device_train_batch_size",
    "precision": "training.precision",
    "memory": "training.memory",
    "optim": "training.optim",
    "freeze_embeddings": "training.freeze_embeddings",
    "epochs": "training.num_train_epochs",
    "cache": "cache",
    "space": "space",
    "corpus": "corpus",
}


@click.command()
@click.argument("config", required=False, metavar="[RUN.yaml]", type=PATH)
@click.option("--student", "--model-name-or-path", "student", help="Local folder, hub id, or shape:NAME.")
@click.option(
    "--cache",
    type=PATH,
    help="Teacher cache, for the teacher's width and the corpus.  [default: without --teacher-dim and --teacher, "
    "$TCACHE_HOME or ~/.cache/tcache]",
)
@space_option
@corpus_option
@click.option("--teacher-dim", type=click.IntRange(1), help="Width of the teacher's vectors, without a cache.")
@click.option("--teacher", metavar="MODEL", help="A teacher that encodes at every step: a folder, or shape:NAME.")
@recipe_option
@click.option("--objective", help="Name from `distill list objectives`.  [default: cosine]")
@click.option("--sharpness", help="Name from `distill list sharpness`.  [default: none]")
@click.option(
    "--batch-size",
    "--per-device-train-batch-size",
    "batch_size",
    type=click.IntRange(1),
    help="Texts in a batch.  [default: 32]",
)
@click.option("--length", type=click.IntRange(1), help="Tokens of every text.  [default: those of the corpus]")
@click.option(
    "--precision", type=click.Choice(["auto", "fp16", "bf16", "fp32"]), help="Precision of training.  [default: auto]"
)
@click.option(
    "--memory",
    type=click.Choice(["default", "low"]),
    help="low recomputes states in the backward pass.  [default: default]",
)
@click.option("--optim", help="Optimizer, such as adamw_bnb_8bit.  [default: adamw_torch_fused]")
@click.option(
    "--freeze-embeddings", type=click.BOOL, metavar="BOOL", help="Do not train word embeddings.  [default: false]"
)
@click.option("--epochs", "--num-train-epochs", "epochs", type=float, help="Epochs of the run.  [default: 5]")
@click.option("--records", type=click.IntRange(1), help="Records of an epoch, without a cache.")
@click.option(
    "--attention",
    type=click.Choice(["fused", "eager"]),
    default="fused",
    help="Attention on GPUs: torch's fused kernels, or eager, which stores the attention maps.",
)
@click.option("--device-memory", metavar="SIZE", help="Memory that a step should fit into.  [default: 15GB, a T4's]")
@click.option("--no-suggestions", is_flag=True, help="Do not search for settings that need less memory.")
@set_option("Any setting of a run.")
@common_options
def plan(
    config: Path | None,
    teacher_dim: int | None,
    teacher: str | None,
    length: int | None,
    records: int | None,
    attention: str,
    device_memory: str | None,
    no_suggestions: bool,
    sets: tuple[str, ...],
    **flags: Any,
) -> None:
    """Estimate memory, FLOPs and time of a training step.

    Takes the settings of `distill run`, from RUN.yaml, flags and --set. No weights and no GPU are needed: the code of
    a step runs on tensors without data, and every allocation is counted.

    \b
    Example:
      distill plan --student shape:bert-base --teacher-dim 1024 --length 64 --batch-size 32
    """
    with progress_bar() as update:
        update("estimating a training step", 0, 0, "")
        from distill.config import RunConfig
        from distill.plan.devices import parse_bytes
        from distill.plan.estimate import plan as estimate

        given = [f"{KEYS[flag]}={value}" for flag, value in flags.items() if value is not None]
        settings = RunConfig.load(config, [*given, *sets])
        if not settings.cache and teacher_dim is None and teacher is None:
            settings = replace(settings, cache=default_cache_if_any() or "")
        found = estimate(
            settings,
            length=length,
            teacher_dim=teacher_dim,
            teacher=teacher,
            attention=attention,
            device_memory=None if device_memory is None else parse_bytes(device_memory),
            records=records,
            suggest=not no_suggestions,
            announce=print_status,
        )
    emit(found.to_json(), lambda: lines(found))


def lines(found: "Plan") -> list[str]:
    """A plan as lines of text."""
    printed = [
        f"{found.student} ({found.parameters / 1e6:.0f} M parameters), {found.objective}, sharpness {found.sharpness}, "
        f"batch {found.batch}, {found.precision}",
        f"peak memory on a GPU: {size(found.peak_bytes)} (allocated {size(found.allocated_bytes)})",
        *(f"  {kind:<14}{size(number):>10}" for kind, number in found.breakdown.items()),
        f"a step: {found.flops_per_step / 1e12:.2f} TFLOP, texts of {found.lengths['typical']['mean']:g} tokens on "
        f"average, at most {found.lengths['largest']['longest']}",
        f"{'device':<10}{'precision':>10}{'peak':>10}{'fits':>6}{'ms/step':>11}{'time':>9}",
    ]
    for name, device in found.devices.items():
        step = "-" if device.step_ms is None else f"{device.step_ms:,.0f}"
        time = "-" if device.step_ms is None or not found.steps else duration(found.steps * device.step_ms / 1000)
        fits = "yes" if device.fits else "no"
        note = f"  {device.note}" if device.note else ""
        printed.append(
            f"{name:<10}{device.precision:>10}{size(device.peak_bytes):>10}{fits:>6}{step:>11}{time:>9}{note}"
        )
    printed += [f"assumed: {assumption}" for assumption in found.assumptions]
    if found.fits:
        return [*printed, f"fits into {size(found.device_memory)}"]
    printed.append(f"does not fit into {size(found.device_memory)}" + ("; what helps:" if found.suggestions else ""))
    for one in found.suggestions:
        settings = " ".join(f"--set {setting}" for setting in one.settings)
        printed.append(f"  {size(one.peak_bytes):>8} {'fits' if one.fits else '    '}  {one.change}: {settings}")
    return printed

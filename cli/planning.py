"""`distill plan`: what a training will take, before it is begun."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common import common_options, emit, say, size

if TYPE_CHECKING:
    from distill.plan.estimate import Plan

# Flags that are settings of a run under another name.
KEYS = {
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
@click.argument("config", required=False, metavar="[RUN.yaml]", type=click.Path(path_type=Path))
@click.option("--student", "--model-name-or-path", "student", help="Local folder, hub id, or shape:NAME.")
@click.option("--cache", help="Teacher cache: gives the teacher's width, and the lengths and records of its corpus.")
@click.option("--space", help="Embedding space of the cache; needed when it has several.")
@click.option("--corpus", help="Corpus of the cache; needed when it has several.")
@click.option("--teacher-dim", type=click.IntRange(1), help="Width of the teacher's vectors, where there is no cache.")
@click.option("--teacher", metavar="MODEL", help="Asked at every step on the same device: a folder, or shape:NAME.")
@click.option("--objective", help="A name of `distill list objectives`.  [default: talas]")
@click.option("--sharpness", help="A name of `distill list sharpness`.  [default: norm-one-view]")
@click.option(
    "--batch-size", "--per-device-train-batch-size", "batch_size", type=click.IntRange(1), help="[default: 32]"
)
@click.option("--length", type=click.IntRange(1), help="Tokens of every text, specials included.")
@click.option("--precision", type=click.Choice(["auto", "fp16", "bf16", "fp32"]), help="[default: auto]")
@click.option("--memory", type=click.Choice(["default", "low"]), help="[default: default]")
@click.option("--optim", help="Optimiser, such as adamw_bnb_8bit.  [default: adamw_torch_fused]")
@click.option("--freeze-embeddings", type=click.BOOL, metavar="BOOL", help="Word embeddings are not trained.")
@click.option("--epochs", "--num-train-epochs", "epochs", type=float, help="[default: 5]")
@click.option("--records", type=click.IntRange(1), help="Of an epoch, where there is no cache.")
@click.option(
    "--attention",
    type=click.Choice(["fused", "eager"]),
    default="fused",
    show_default=True,
    help="On GPUs: torch's kernels, or maps kept as eager attention keeps them.",
)
@click.option("--device-memory", metavar="SIZE", help="What a step should fit into.  [default: a T4's 15GB]")
@click.option("--no-suggestions", is_flag=True, help="Do not look for what would make it fit.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any setting of a run.")
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
    """Foretell memory, FLOPs and time of a training step, without weights and without a GPU.

    Takes the settings of `distill run`, from a YAML file, flags and --set. A step's own code is run on tensors
    without numbers, and every allocation is followed.
    """
    from distill.config import RunConfig
    from distill.plan.devices import parse_bytes
    from distill.plan.estimate import plan as foretell

    given = [f"{KEYS[flag]}={value}" for flag, value in flags.items() if value is not None]
    found = foretell(
        RunConfig.load(config, [*given, *sets]),
        length=length,
        teacher_dim=teacher_dim,
        teacher=teacher,
        attention=attention,
        device_memory=None if device_memory is None else parse_bytes(device_memory),
        records=records,
        suggest=not no_suggestions,
        announce=say,
    )
    emit(found.to_json(), lambda: lines(found))


def lines(found: "Plan") -> list[str]:
    """A plan for a person."""
    told = [
        f"{found.student} ({found.parameters / 1e6:.0f} M parameters), {found.objective}, sharpness {found.sharpness}, "
        f"batch {found.batch}, {found.precision}",
        f"peak memory on a GPU: {size(found.peak_bytes)} (allocated {size(found.allocated_bytes)})",
        *(f"  {kind:<14}{size(count):>10}" for kind, count in found.breakdown.items()),
        f"a step: {found.flops_per_step / 1e12:.2f} TFLOP, texts of {found.lengths['typical']['mean']:g} tokens on "
        f"average, at most {found.lengths['largest']['longest']}",
        f"{'device':<10}{'precision':>10}{'peak':>10}{'fits':>6}{'ms a step':>11}{'hours':>8}",
    ]
    for name, device in found.devices.items():
        step = "-" if device.step_ms is None else f"{device.step_ms:,.0f}"
        hours = "-" if device.hours is None else f"{device.hours:.2f}"
        fits = "yes" if device.fits else "no"
        note = f"  {device.note}" if device.note else ""
        told.append(f"{name:<10}{device.precision:>10}{size(device.peak_bytes):>10}{fits:>6}{step:>11}{hours:>8}{note}")
    told += [f"assumed: {assumption}" for assumption in found.assumptions]
    if found.fits:
        return [*told, f"fits into {size(found.device_memory)}"]
    told.append(f"does not fit into {size(found.device_memory)}" + ("; what helps:" if found.suggestions else ""))
    for one in found.suggestions:
        settings = " ".join(f"--set {setting}" for setting in one.settings)
        told.append(f"  {size(one.peak_bytes):>8} {'fits' if one.fits else '    '}  {one.change}: {settings}")
    return told

"""Curvature: how sharp the loss is at a run's checkpoints.

On a fixed sample of training records in batches of `batch`, with L the mean over these batches of the run's objective
(all terms), w a checkpoint's weights and g_b the gradient of batch b,

    lambda   = largest eigenvalue of the Hessian of L at w     `distill.sharpness.hessian`, by two methods
    rise     = mean over batches of L_b(w + eps_b) - L_b(w),   eps_b = rho T^2 g_b / ||T g_b||

with T = 1 for `sharpness` (SAM's) and T = |w| for `adaptive_sharpness` (ASAM's). If weights before a normalization are
scaled down, the student stays the same but lambda grows; the adaptive rise does not. eps is computed for each batch, as
in training with SAM, because the terms compare the texts of a batch.

`student` is over the student's parameters with the objective's projections fixed; `with_heads` is over both.
Everything is computed in float32 without dropout. The two views of a text are then equal and encoded once: a
contrastive term only separates the texts. Objectives that train in stages are in their last one.

Published values of lambda (TALAS, table 4: 30.2 to 17.4 for AdamW, 14.9 to 9.9 for ASAM) name neither loss, batch nor
parameters: their order can be compared, their size cannot.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from distill.analyses.base import LARGEST_SEED, Analysis, choice_option, float_option, int_option
from distill.analyses.trained_run import TrainedRun
from distill.errors import EvaluationError, NonFiniteLoss
from distill.sharpness.ascent import SharpnessAware
from distill.sharpness.hessian import DoubleBackward, GradientDifferences, Hessian, lanczos, power_iteration
from distill.training.checkpoints import STATE, checkpoint_step
from distill.training.trainer import Distillation

SIDES = {"student": "of the student's parameters", "with_heads": "with the heads'"}
# Relative difference up to which the two methods agree.
AGREED = 0.01

Inputs = Mapping[str, Any]


class Curvature(Analysis):
    """Measures the curvature of a run's loss at its checkpoints, newest last."""

    name: ClassVar[str] = "curvature"

    def __init__(
        self,
        *,
        checkpoints: int | None = None,
        texts: int = 64,
        batch: int = 32,
        rho: float = 0.05,
        adaptive_rho: float = 0.5,
        heads: bool = True,
        differences: bool = False,
        iterations: int = 60,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """
        Args:
            checkpoints: at most this many, evenly spread and with the newest; None is all.
            texts: training records of the loss; time and memory are proportional.
            heads: also compute `with_heads`, which doubles the time.
            differences: compute Hessian-vector products as differences of gradients: equally slow, in the memory of one
                batch, accurate to about 1e-4. Always used for losses without a second derivative.
        """
        super().__init__(**options)
        self.checkpoints = None if checkpoints is None else int_option("curvature.checkpoints", checkpoints, 1)
        self.texts = int_option("curvature.texts", texts, 2)
        self.batch = int_option("curvature.batch", batch, 2)
        self.rho = float_option("curvature.rho", rho, above=0)
        self.adaptive_rho = float_option("curvature.adaptive_rho", adaptive_rho, above=0)
        self.heads: bool = choice_option("curvature.heads", heads, (True, False))
        self.differences: bool = choice_option("curvature.differences", differences, (True, False))
        self.iterations = int_option("curvature.iterations", iterations, 1)
        self.seed = int_option("curvature.seed", seed, 0, LARGEST_SEED)

    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        """`loss` (its description), `texts`, `batch`, and `points` with the figures of a checkpoint each."""
        points = []
        chosen = _evenly_spread(run.checkpoints(), self.checkpoints)
        for number, checkpoint in enumerate(chosen):
            self.progress("measuring curvature", number, len(chosen), checkpoint.name)
            model = run.load(checkpoint)
            batches = list(run.batches(model, self.texts, self.batch, self.seed))
            if not batches:
                raise EvaluationError(f"{run.folder} has fewer than 2 training records to measure its loss on")
            state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
            point = {
                "step": checkpoint_step(checkpoint),
                "epoch": round(float(state["epoch"]), 4),
                **self.measure(model, batches),
            }
            self.announce(f"step {point['step']:,}: {_figures(point)}")
            points.append(point)
        return {
            "loss": f"{run.config.objective.name}, all terms, without dropout",
            "texts": sum(len(inputs["vectors"]) for inputs in batches),
            "batch": self.batch,
            "points": points,
        }

    @staticmethod
    def conclusion(result: Mapping[str, Any]) -> str:
        first, last = result["points"][0], result["points"][-1]
        earlier = f", {_figures(first)} at step {first['step']:,}" if first is not last else ""
        adaptive, loss = last["adaptive_sharpness"], last["value"]
        text = (
            f"{_figures(last)} at step {last['step']:,}{earlier}; there the worst point within an adaptive radius of "
            f"{adaptive['rho']:g} raises the loss of {loss:.4g} by {adaptive['rise']:.2g} "
            f"({100 * adaptive['relative']:.1f} %)."
        )
        return text[0].upper() + text[1:]

    def measure(self, model: Distillation, batches: Sequence[Inputs]) -> dict[str, Any]:
        """The figures of a model, whose weights are restored bit for bit.

        Args:
            batches: arguments of `model`; with exact products the graphs of all losses are in memory.

        Returns:
            `value` of the loss; `products`, "exact" or "differences"; `student` and `with_heads`, each with
            `parameters`, `power` and `lanczos`, or None if there are none or the loss is flat along them;
            `sharpness` and `adaptive_sharpness` with `rho`, `rise` and `relative`, the rise as a share of the loss.
        """

        def loss(inputs: Inputs) -> Tensor:
            value: Tensor = model(**inputs)["loss"]
            return value

        found: dict[str, Any] = {
            "sharpness": self._rise(model, loss, batches, "none", self.rho),
            "adaptive_sharpness": self._rise(model, loss, batches, "abs", self.adaptive_rho),
        }
        with torch.no_grad():
            found["value"] = float(torch.stack([loss(inputs) for inputs in batches]).mean())
        if not self.differences:
            # Fused attention kernels have no second derivative.
            with sdpa_kernel([SDPBackend.MATH]):
                mean = torch.stack([loss(inputs) for inputs in batches]).mean()
                exact = DoubleBackward(mean, model.parameters())
            try:
                return found | {"products": "exact"} | self._eigenvalues(model, exact)
            except NonFiniteLoss:
                del mean, exact
                self.announce("the loss cannot be differentiated twice; using differences of its gradients")
        differences = GradientDifferences(lambda: (loss(inputs) for inputs in batches), model.parameters())
        return found | {"products": "differences"} | self._eigenvalues(model, differences)

    def _eigenvalues(self, model: Distillation, hessian: Hessian) -> dict[str, Any]:
        student = hessian.block(model.student.parameters())
        return {
            "student": self._largest(student),
            "with_heads": self._largest(hessian) if self.heads and hessian.size > student.size else None,
        }

    def _largest(self, hessian: Hessian) -> dict[str, Any] | None:
        power = power_iteration(hessian, seed=self.seed, iterations=self.iterations)
        other = lanczos(hessian, seed=self.seed)
        if power is None or other is None:
            return None
        return {"parameters": hessian.size, "power": asdict(power), "lanczos": asdict(other)}

    def _rise(
        self, model: Distillation, loss: Callable[[Inputs], Tensor], batches: Sequence[Inputs], scaling: str, rho: float
    ) -> dict[str, float]:
        """Rise of the loss at the worst point near the student's parameters."""
        ascent = SharpnessAware(model.student.named_parameters(), scaling=scaling, rho=rho)
        before, rise = 0.0, 0.0
        for inputs in batches:
            at_weights = loss(inputs)
            with ascent.ascended(at_weights), torch.no_grad():
                rise += float(loss(inputs) - at_weights.detach())
            before += float(at_weights.detach())
        return {"rho": rho, "rise": rise / len(batches), "relative": rise / before if before else 0.0}


def _evenly_spread(checkpoints: Sequence[Path], count: int | None) -> list[Path]:
    """At most `count` checkpoints, evenly spread and with the last one."""
    if count is None or count >= len(checkpoints):
        return list(checkpoints)
    places = np.linspace(len(checkpoints) - 1, 0, count).round().astype(int)
    return [checkpoints[place] for place in sorted(set(places.tolist()))]


def _figures(point: Mapping[str, Any]) -> str:
    """The largest eigenvalues of a point, as text."""
    known = [f"{_figure(point[side])} {name}" for side, name in SIDES.items() if point[side] is not None]
    return f"largest eigenvalue {' and '.join(known)}" if known else "no curvature"


def _figure(side: Mapping[str, Any]) -> str:
    """Lanczos's value, and that of power iteration if they differ by more than 1 %."""
    lanczos, power = side["lanczos"], side["power"]
    text = f"{'' if lanczos['converged'] else 'at least '}{lanczos['value']:.4g}"
    if abs(power["value"] - lanczos["value"]) > AGREED * abs(lanczos["value"]):
        text += f" ({'' if power['converged'] else 'at least '}{power['value']:.4g} by power iteration)"
    return text

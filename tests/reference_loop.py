"""A plain training loop without Trainer, the reference for `DistillTrainer`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distill.data.sampler import StreamingSampler
from distill.objectives.base import Objective, StudentOutput, TeacherTargets
from distill.student.student import Student


def train(
    student: Student,
    objective: Objective,
    records: Callable[[Sequence[int]], Any],
    collate: Callable[[Any], dict[str, torch.Tensor]],
    sampler: StreamingSampler,
    *,
    steps: int,
    accumulate: int,
    warmup: int,
    learning_rate: float,
    head_learning_rate: float,
    weight_decay: float,
    floor: float,
    rho: float | None,
    adaptive: bool = True,
    every: int = 1,
    ascent_loss: Callable[[StudentOutput, TeacherTargets], torch.Tensor] | None = None,
    ascent_views: int | None = None,
) -> list[dict[str, float]]:
    """Train in place and return each step's terms.

    Args:
        rho: of SAM, or with `adaptive` of ASAM under T = |w|; one ascent per micro-batch, in every `every`-th step.
        ascent_loss: ascended instead of the loss.
        ascent_views: views that the first pass encodes for it; the returned terms are then those of the second pass.
    """
    heads = list(objective.parameters())
    groups = [{"params": list(student.parameters()), "lr": learning_rate}]
    groups += [{"params": heads, "lr": head_learning_rate}] if heads else []
    rates = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    weights = [*student.parameters(), *heads]

    def encode(batch: dict[str, torch.Tensor], views: int | None = None) -> tuple[StudentOutput, TeacherTargets]:
        rows = None if views is None else views * len(batch["vectors"])
        ids, mask = batch["input_ids"][:rows], batch["attention_mask"][:rows]
        output = StudentOutput(student(ids, mask), views=len(ids) // len(batch["vectors"]))  # one forward for all
        return output, TeacherTargets(batch["vectors"], batch["text_ids"], batch.get("domains"))

    student.train()
    log: list[dict[str, float]] = []
    epoch = 0
    while len(log) < steps:
        sampler.set_epoch(epoch)
        torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws a seed for its workers
        batches = [collate(records(numbers)) for numbers in sampler]
        for start in range(0, len(batches), accumulate):
            if len(log) == steps:
                break
            now, done = batches[start : start + accumulate], len(log)
            past = (done - warmup) / (steps - warmup)
            cosine = floor + (1 - floor) * (1 + math.cos(math.pi * past)) / 2
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (done / warmup if done < warmup else cosine)
            means: dict[str, float] = {}
            for batch in now:
                ascends = rho is not None and done % every == 0
                output, targets = encode(batch, ascent_views if ascends else None)
                logged = objective(output, targets)
                loss = sum(logged.values(), start=torch.zeros(()))
                originals = [weight.detach().clone() for weight in weights]
                if rho is not None and ascends:
                    ascended = loss if ascent_loss is None else ascent_loss(output, targets)
                    gradients = torch.autograd.grad(ascended, weights, allow_unused=True)
                    t = [w.abs() if adaptive else torch.ones_like(w) for w in originals]
                    scaled = [s * (0 if g is None else g) for s, g in zip(t, gradients, strict=True)]
                    norm = torch.cat([s.flatten() for s in scaled]).norm()
                    with torch.no_grad():  # eps = rho * T^2 g / ||T g||
                        for weight, scale, s in zip(weights, t, scaled, strict=True):
                            weight += rho * scale * s / (norm + 1e-12)
                    found = objective(*encode(batch))
                    loss = sum(found.values(), start=torch.zeros(()))
                    logged = logged if ascent_views is None else found
                for name, term in logged.items():
                    means[name] = means.get(name, 0.0) + term.item() / len(now)
                (loss / len(now)).backward()
                with torch.no_grad():
                    for weight, w in zip(weights, originals, strict=True):
                        weight.copy_(w)
            optimizer.step()
            optimizer.zero_grad()
            log.append(means)
        epoch += 1
    return log

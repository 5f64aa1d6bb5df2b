"""What a run means, in one plain loop: the oracle for `DistillTrainer`. It knows no Trainer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distill.data.sampler import StreamingSampler
from distill.objectives.base import Objective, StudentOutput, TeacherTargets
from distill.student import Student


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
) -> list[dict[str, float]]:
    """Train in place and return each step's terms. `rho`: with ASAM under T = |w|, one ascent a micro-batch."""
    heads = list(objective.parameters())
    groups = [{"params": list(student.parameters()), "lr": learning_rate}]
    groups += [{"params": heads, "lr": head_learning_rate}] if heads else []
    rates = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    weights = [*student.parameters(), *heads]

    def terms(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        states = student(batch["input_ids"], batch["attention_mask"])  # all views in one forward
        output = StudentOutput(states, views=len(batch["input_ids"]) // len(batch["vectors"]))
        found: dict[str, torch.Tensor] = objective(output, TeacherTargets(batch["vectors"], batch["text_ids"]))
        return found

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
                found = terms(batch)
                loss = sum(found.values(), start=torch.zeros(()))
                for name, term in found.items():
                    means[name] = means.get(name, 0.0) + term.item() / len(now)
                originals = [weight.detach().clone() for weight in weights]
                if rho is not None:
                    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
                    scaled = [w.abs() * (0 if g is None else g) for w, g in zip(originals, gradients, strict=True)]
                    norm = torch.cat([s.flatten() for s in scaled]).norm()
                    with torch.no_grad():  # eps = rho * T^2 g / ||T g||, T = |w|
                        for weight, w, s in zip(weights, originals, scaled, strict=True):
                            weight += rho * w.abs() * s / (norm + 1e-12)
                    loss = sum(terms(batch).values(), start=torch.zeros(()))
                (loss / len(now)).backward()
                with torch.no_grad():
                    for weight, w in zip(weights, originals, strict=True):
                        weight.copy_(w)
            optimizer.step()
            optimizer.zero_grad()
            log.append(means)
        epoch += 1
    return log

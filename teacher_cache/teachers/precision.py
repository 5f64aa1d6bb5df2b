"""Resolving the dtype "auto": bfloat16 measured against float32, with the model on its device."""

import logging
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import TeacherError
from teacher_cache.storage.codec import cosine_errors
from teacher_cache.teachers.base import Teacher, TeacherSpec

logger = logging.getLogger("teacher_cache")

# What bfloat16 must reach to be worth its rounding error.
MIN_SPEEDUP = 1.1
MIN_COSINE = 0.9995

# Aim for all timed calls together, without loading.
_SECONDS = 2.0
_ROUNDS = 3

_SENTENCES = (
    "Yes.",
    "Where is the station?",
    "The meeting was moved to Thursday afternoon.",
    "She opened the window because the room had become too warm.",
    "My card was charged twice for the same order, and nobody has answered my messages yet.",
    "Heavy rain is expected in the north tomorrow, while the coast stays dry with strong west winds.",
    "Researchers compared two ways of storing grain over a winter and found that the older one, which "
    "needs no electricity at all, lost less of the harvest than the newer one.",
    "A man who had never left his village took the night train to the capital, walked through its streets "
    "until the shops opened, bought the violin he had seen in a newspaper thirty years before, and went "
    "home on the next train without having spoken to anyone but the shopkeeper, who wrapped it well.",
)
PROBE_TEXTS = tuple(f"{text} {i}" if i else text for i in range(4) for text in _SENTENCES)


def choose_dtype(spec: TeacherSpec, load: Callable[[TeacherSpec], Teacher]) -> str:
    """ "bfloat16" if it is at least 1.1 times as fast as float32 and every probe vector has a cosine of at least
    0.9995 to the float32 one, otherwise "float32"; never float16, which can overflow.

    A model that does not fit on the device in float32 gets bfloat16 without measuring.
    """
    import torch

    from teacher_cache.teachers.loading import choose_device

    device = choose_device(spec.options.device)
    name = spec.space.teacher
    # Emulated bfloat16 on older GPUs is slower than float32.
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        logger.info("%s: %s has no bfloat16, computing in float32", name, torch.cuda.get_device_name(device))
        return "float32"
    try:
        full = load(spec.with_dtype("float32"))
    except TeacherError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        logger.info("%s: does not fit on %s in float32, computing in bfloat16 without measuring", name, device)
        return "bfloat16"
    count = _probe_size(full)
    reference, full_seconds = _timed(full, count)
    # One model at a time: a large teacher may fit on the device only once.
    del full
    try:
        rounded, half_seconds = _timed(load(spec.with_dtype("bfloat16")), count)
    except TeacherError as error:
        logger.info("%s: computing in float32, bfloat16 failed: %s", name, error)
        return "float32"
    speedup = full_seconds / half_seconds
    # A non-finite or zero row makes the minimum NaN, which fails every comparison.
    cosine = 1 - float(cosine_errors(reference.astype(np.float64), rounded.astype(np.float64)).max())
    chosen = "bfloat16" if speedup >= MIN_SPEEDUP and cosine >= MIN_COSINE else "float32"
    logger.info(
        "%s: bfloat16 is %.2f times as fast as float32 on %s, lowest cosine %.5f: computing in %s",
        name,
        speedup,
        device,
        cosine,
        chosen,
    )
    return chosen


def _probe_size(teacher: Teacher) -> int:
    """Number of probe texts in each timed call."""
    few = PROBE_TEXTS[: len(_SENTENCES)]
    started = time.perf_counter()
    teacher.encode(few)
    per_text = (time.perf_counter() - started) / len(few)
    # At least the first eight, so that the cosine covers short and long texts.
    return max(len(few), min(len(PROBE_TEXTS), int(_SECONDS / (2 * _ROUNDS * per_text))))


def _timed(teacher: Teacher, count: int) -> tuple[npt.NDArray[np.float32], float]:
    """Vectors of the first `count` probe texts, and the seconds of the fastest round."""
    texts = PROBE_TEXTS[:count]
    # Warm-up: the first call compiles kernels and fills caches.
    vectors = teacher.encode(texts)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        teacher.encode(texts)
        seconds.append(time.perf_counter() - started)
    return vectors, min(seconds)

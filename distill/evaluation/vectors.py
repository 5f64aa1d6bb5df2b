"""The vectors that tasks need, each distinct text encoded once."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from distill.errors import EvaluationError
from distill.evaluation.base import TEXT, Encoder, Input, Progress, Vectors, no_progress
from distill.evaluation.encoders import encode_all


class TaskVectors:
    """Vectors of the inputs of several tasks, one float32 matrix for each encoder.

    Args:
        encoders: by role; roles that share an encoder share its vectors.
    """

    def __init__(
        self, encoders: Mapping[str, Encoder], inputs: Mapping[str, Sequence[Input]], progress: Progress = no_progress
    ) -> None:
        # By identity of the encoder: the row of each of its texts.
        by_id = {id(encoder): encoder for encoder in encoders.values()}
        self._rows: dict[int, dict[str, int]] = {key: {} for key in by_id}
        self._encoders = {role: id(encoder) for role, encoder in encoders.items()}
        roles: dict[int, dict[str, None]] = {key: {} for key in by_id}
        for task, listed in inputs.items():
            for text, role in listed:
                if role not in encoders:
                    raise EvaluationError(f"task {task!r} needs vectors of role {role!r}, which has no encoder")
                own = self._rows[self._encoders[role]]
                own.setdefault(text, len(own))
                roles[self._encoders[role]][role] = None
        self.texts = len(set().union(*self._rows.values()))
        self._matrices = {
            key: encode_all(by_id[key], list(own), progress, f"encoding texts ({', '.join(roles[key])})")
            for key, own in self._rows.items()
            if own
        }
        self._check_finite(inputs)

    def of_task(self, task: str) -> Vectors:
        """The vectors of a task's inputs; asking for others is an EvaluationError."""

        def vectors(texts: Sequence[str], role: str = TEXT, /) -> npt.NDArray[np.float32]:
            try:
                key = self._encoders[role]
                return self._matrices[key][[self._rows[key][text] for text in texts]]
            except KeyError as error:
                raise EvaluationError(
                    f"task {task!r} uses the vector of a {role} that its inputs() do not list: {error}"
                ) from error

        return vectors

    def _check_finite(self, inputs: Mapping[str, Sequence[Input]]) -> None:
        bad = {key: set(np.flatnonzero(~np.isfinite(m).all(axis=1)).tolist()) for key, m in self._matrices.items()}
        if any(bad.values()):
            counts = []
            for task, listed in inputs.items():
                used = {(self._encoders[role], text) for text, role in listed}
                count = sum(self._rows[key][text] in bad[key] for key, text in used)
                counts += [f"{task} {count}"] if count else []
            raise EvaluationError(
                f"{sum(map(len, bad.values()))} of {sum(map(len, self._rows.values()))} texts have vectors with NaN or "
                f"infinity (by task: {', '.join(counts)}); encode in float32, or check the model's weights"
            )

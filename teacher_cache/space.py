"""An embedding space: everything that can change a vector.

Vectors can be compared, averaged or trained on together only if their spaces are equal. The folder of a space in a
cache is named after its fingerprint, so a changed prompt, pooling, weight or maximum length is another folder and
never returns stale vectors.
"""

import json
import re
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any, Self

# For people and hub downloads. The digests identify the weights: a model folder under another name is the same space.
LABELS = frozenset({"teacher", "revision"})


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpace:
    """One teacher with one prompt, pooling, length and precision.

    Attributes:
        teacher: hub id, or the name of a local folder. A label, not part of the identity.
        revision: commit of a hub model, "" for a local folder. A label.
        backend: module that computes the vectors ("transformer", "sentence_transformer", "toy").
        weights: hex digest of the model's configuration and weights.
        tokenizer: hex digest of the tokenizer's files.
        pooling: "mean", "cls", "last_token".
        padding_side: "left" or "right".
        prompt: exact text prepended to every input, "" for none.
        max_length: most tokens of a text, including special tokens and prompt; longer texts are truncated.
        truncation_side: "left" or "right", the end at which texts are truncated.
        normalize: whether vectors have unit length.
        dims: width of a vector. Below the model's own width, vectors are truncated, then normalized again if
            `normalize` is set.
        dtype: precision the teacher computes in ("float32", "bfloat16", "float16"), or "auto" until it is resolved.
    """

    teacher: str
    revision: str
    backend: str
    weights: str
    tokenizer: str
    pooling: str
    padding_side: str
    prompt: str
    max_length: int
    truncation_side: str
    normalize: bool
    dims: int
    dtype: str

    @property
    def fingerprint(self) -> str:
        """32 hex digits over every field except the labels."""
        identity = {k: v for k, v in asdict(self).items() if k not in LABELS}
        canonical = json.dumps(identity, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return blake2b(canonical.encode(), digest_size=16).hexdigest()

    @property
    def slug(self) -> str:
        """Folder name: the teacher's name and the first 8 digits of the fingerprint."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.teacher.rstrip("/").rsplit("/", 1)[-1]).strip(".-")
        return f"{name or 'teacher'}@{self.fingerprint[:8]}"

    def difference(self, other: "EmbeddingSpace", *, labels: bool = False) -> dict[str, tuple[Any, Any]]:
        """Fields in which two spaces differ, as `{field: (value here, value in other)}`."""
        return {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
            if (labels or field.name not in LABELS) and getattr(self, field.name) != getattr(other, field.name)
        }

    def matches(self, stored: "EmbeddingSpace") -> bool:
        """Whether `stored` equals this space; if the dtype here is "auto", any stored dtype matches."""
        different = set(self.difference(stored))
        return not different or (self.dtype == "auto" and different == {"dtype"})

    def describe(self) -> str:
        """One line: teacher, pooling, prompt, length, width, precision."""
        prompt = f"prompt {self.prompt!r}" if self.prompt else "no prompt"
        unit = "unit length" if self.normalize else "not normalized"
        return (
            f"{self.teacher} · {self.pooling} pooling · {prompt} · at most {self.max_length} tokens · "
            f"{self.dims} dims, {unit} · {self.dtype}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        names = {field.name for field in fields(cls)}
        if set(record) != names:
            raise ValueError(
                f"not an embedding space: missing fields {sorted(names - set(record))}, "
                f"unknown fields {sorted(set(record) - names)}"
            )
        return cls(**record)

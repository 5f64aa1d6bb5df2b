"""An embedding space: everything that could change a vector.

Two vectors may be compared, averaged or trained on together only when their spaces are equal. The space's
fingerprint names its folder in a cache, so a changed prompt, pooling, weight or maximum length can never
serve stale vectors: it is another folder.
"""

import json
import re
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any, Self

# Labels: they help a person and a hub, but the digests say what the weights are. The same folder under
# another name must stay the same space.
LABELS = frozenset({"teacher", "revision"})


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpace:
    """One teacher asked in one way.

    Attributes:
        teacher: hub id, or the name of a local folder. A label, not part of the identity.
        revision: commit of a hub model, "" for a local folder. A label.
        backend: the module that computes the vectors ("transformer", "sentence_transformer", "toy").
        weights: digest of the model's configuration and weights (hex).
        tokenizer: digest of the tokenizer's files (hex).
        pooling: "mean", "cls", "last_token".
        padding_side: "left" or "right", on which side a batch is padded.
        prompt: the exact text put in front of every input, "" for none.
        max_length: tokens, specials included; longer texts are cut.
        truncation_side: "left" or "right", which end of an over-long text is cut off.
        normalize: whether vectors have unit length.
        dims: width of a stored vector; below the model's own width the vector is cut, then renormalised
            if `normalize`.
        dtype: compute precision of the teacher ("float32", "bfloat16", "float16"), or "auto" before it is
            settled.
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
        """32 hex digits over every field that can change a vector; the labels are left out."""
        identity = {k: v for k, v in asdict(self).items() if k not in LABELS}
        canonical = json.dumps(identity, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return blake2b(canonical.encode(), digest_size=16).hexdigest()

    @property
    def slug(self) -> str:
        """Folder name: the teacher's readable name and the first 8 digits of the fingerprint."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.teacher.rstrip("/").rsplit("/", 1)[-1]).strip(".-")
        return f"{name or 'teacher'}@{self.fingerprint[:8]}"

    def difference(self, other: "EmbeddingSpace", *, labels: bool = False) -> dict[str, tuple[Any, Any]]:
        """The fields in which the two spaces differ: `{field: (mine, theirs)}`, empty when they are one."""
        return {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
            if (labels or field.name not in LABELS) and getattr(self, field.name) != getattr(other, field.name)
        }

    def matches(self, held: "EmbeddingSpace") -> bool:
        """Whether `held` is this space; a precision that is still "auto" here is any that is held."""
        different = set(self.difference(held))
        return not different or (self.dtype == "auto" and different == {"dtype"})

    def describe(self) -> str:
        """One line a person can check: teacher, prompt, pooling, length, width, precision."""
        prompt = f"prompt {self.prompt!r}" if self.prompt else "no prompt"
        unit = "unit length" if self.normalize else "not normalised"
        return (
            f"{self.teacher} · {self.pooling} pooling · {prompt} · at most {self.max_length} tokens · "
            f"{self.dims} dims, {unit} · {self.dtype}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            ValueError: a field is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if set(record) != names:
            raise ValueError(
                f"not an embedding space: missing fields {sorted(names - set(record))}, "
                f"unknown fields {sorted(set(record) - names)}"
            )
        return cls(**record)

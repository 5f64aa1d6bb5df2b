"""`cut:MODEL,depth=3,keep=20000` in place of a model: which layers and tokens of MODEL a student keeps."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from distill.config import StudentConfig
from distill.errors import StudentError

PREFIX = "cut:"
# Folder of a run that has the student it was cut into.
FOLDER = "student"
EVERY_TOKEN = "all"
_OPTIONS = re.compile(r"((?:,\w+=[^,]*)*)$")
_FORM = f"{PREFIX}MODEL with ,depth=3 or ,layers=0+2+5, and ,keep=20000 or ,keep={EVERY_TOKEN}"


@dataclass(frozen=True)
class CutSpec:
    """What is kept of a model.

    Attributes:
        model: local folder or hub id.
        layers: numbers of the kept blocks from 0, ascending; None keeps all, or `depth` of them.
        depth: number of kept blocks, which are chosen.
        keep: number of kept tokens, "all" those of a corpus, or None the whole vocabulary.
    """

    model: str
    layers: tuple[int, ...] | None = None
    depth: int | None = None
    keep: int | str | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and self.depth is not None:
            raise StudentError("both `layers` and `depth` were given: keep one")
        if self.layers is not None and (not self.layers or list(self.layers) != sorted(set(self.layers))):
            found = ",".join(map(str, self.layers))
            raise StudentError(
                f"`layers` is {found or 'empty'}, expected ascending block numbers from 0, such as 0,2,5"
            )
        if self.depth is not None and self.depth < 1:
            raise StudentError(f"`depth` is {self.depth}, expected at least 1 layer")
        if self.keep is not None and self.keep != EVERY_TOKEN and (not isinstance(self.keep, int) or self.keep < 1):
            raise StudentError(f"`keep` is {self.keep!r}, expected a number of tokens, at least 1, or {EVERY_TOKEN!r}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The specification in a name that `is_cut`.

        Raises:
            StudentError: an option is unknown or its value is not of its kind.
        """
        plain = text.removeprefix(PREFIX)
        found = _OPTIONS.search(plain)
        listed = found[1] if found else ""
        values = dict(part.split("=", 1) for part in listed.split(",") if part)
        unknown = sorted(values.keys() - {"layers", "depth", "keep"})
        model = plain.removesuffix(listed)
        if unknown or not model:
            raise StudentError(
                f"{text!r} has {f'the unknown option {unknown[0]!r}' if unknown else 'no model'}: {_FORM}"
            )
        try:
            layers = tuple(map(int, values["layers"].split("+"))) if "layers" in values else None
            depth = int(values["depth"]) if "depth" in values else None
            keep = values.get("keep")
            kept = int(keep) if keep is not None and keep != EVERY_TOKEN else keep
        except ValueError as error:
            raise StudentError(f"{text!r} has an option that is not a number: {_FORM}") from error
        if not values:
            raise StudentError(f"{text!r} names nothing to cut: {_FORM}")
        return cls(model, layers, depth, kept)

    def layer_count(self, of: int) -> int:
        """Number of kept blocks of a model with `of` blocks.

        Raises:
            StudentError: the model has fewer blocks, or no block of such a number.
        """
        if self.depth is not None and self.depth > of:
            raise StudentError(f"`depth` is {self.depth}, but {self.model} has {of} layers: choose at most these")
        if self.layers is not None and not all(0 <= layer < of for layer in self.layers):
            found = ",".join(map(str, self.layers))
            raise StudentError(f"`layers` is {found}, but the {of} layers of {self.model} are 0 to {of - 1}")
        return of if self.layers is None and self.depth is None else self.depth or len(self.layers or ())

    @property
    def name(self) -> str:
        """Of the model that is made, such as "all-MiniLM-L6-v2-depth3-keep20000"."""
        parts = [Path(self.model).name]
        parts += [] if self.layers is None else [f"layers{'+'.join(map(str, self.layers))}"]
        parts += [] if self.depth is None else [f"depth{self.depth}"]
        return "-".join([*parts, *([] if self.keep is None else [f"keep{self.keep}"])])


def is_cut(model: str) -> bool:
    """Whether a model name is `cut:MODEL,...`."""
    return model.startswith(PREFIX)


def cut_folder(config: StudentConfig, run_folder: str | Path) -> Path:
    """Folder of a run that has the student of a `cut:` model."""
    return Path(run_folder) / FOLDER / CutSpec.parse(config.model).name


def trained_student(config: StudentConfig, run_folder: str | Path) -> StudentConfig:
    """The student that a run trains: that of its settings, or the one that it was cut into."""
    return replace(config, model=str(cut_folder(config, run_folder))) if is_cut(config.model) else config

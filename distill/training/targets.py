"""The teacher's side of a run: which space, or spaces, its targets come from, and what is known token by token."""

from typing import Any

import numpy as np
import numpy.typing as npt

from distill.config import RunConfig, TeacherConfig
from distill.data.collator import Collator
from distill.data.dataset import CachedDataset, require_pairs
from distill.errors import ConfigError, NeedsNotMet
from distill.objectives.base import Objective, TeacherShape
from distill.student.student import Student
from teacher_cache.building.align import AlignmentColumn, AlignmentSettings, stored_alignments
from teacher_cache.storage.manifest import Manifest
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import resolve, token_shape
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.teachers.pieces import ignores_case
from teacher_cache.tokens.request import TokenRequest, TokenShape
from teacher_cache.tokens.token_columns import TokenColumns

# Sharpness that treats the parts of a corpus differently.
NEED_DOMAINS = ("disam",)


class Targets:
    """What a run compares its student with, out of a cache or, with `teacher.mode=online`, from the teacher itself.

    Attributes:
        space: of the cache; several that are asked for are read as one.
        shape: sizes of the teacher; token by token where the space keeps tokens or the teacher is online.

    Raises:
        KnownError: there is no such space, or an online teacher is asked for several.
    """

    def __init__(self, config: RunConfig, cache: TeacherCache) -> None:
        self.config = config
        self.cache = cache
        self.space: SpaceView | JointSpace
        if isinstance(config.space, tuple):
            self.space = JointSpace([cache.space(name) for name in config.space])
        else:
            self.space = cache.space(config.space)
        self.online = config.teacher.mode == "online"
        if self.online and isinstance(self.space, JointSpace):
            raise ConfigError("teacher.mode=online asks one teacher, but several spaces are named; name one space")
        said = token_shape(resolve(_asked(config.teacher))) if self.online else None
        self.shape = teacher_shape(self.space, said)

    def check(self, objective: Objective, manifest: Manifest) -> None:
        """Refuse, before anything is written, an objective that asks for what is not there.

        Raises:
            NeedsNotMet, CacheError: naming what is missing and what would bring it.
        """
        sharpness, corpus = self.config.sharpness, manifest.record
        if sharpness.name in NEED_DOMAINS:
            manifest.domains_of(np.zeros(0, dtype=np.int64))
            if len(corpus.domains) < 2:
                raise NeedsNotMet(
                    f"sharpness {sharpness.name} compares domains, but corpus {corpus.name!r} has only "
                    f"{corpus.domains[0]!r}; use sam"
                )
        unknown = [term for term in sharpness.ascent_terms or () if objective.terms and term not in objective.terms]
        if unknown:
            raise ConfigError(
                f"sharpness.ascent_terms: objective {self.config.objective.name} has no term {unknown[0]!r}; it has "
                f"{', '.join(objective.terms)}"
            )
        if uses_pairs(objective):
            require_pairs(manifest)
        if objective.needs.tokens and not self.online:
            require_tokens(f"objective {self.config.objective.name}", objective, self.space)

    def _request(self, objective: Objective) -> TokenRequest | None:
        """What an online teacher is asked besides vectors."""
        needs = objective.needs
        if not needs.tokens:
            return None
        layers = attention_layers(objective)
        if needs.importance and not layers:  # it comes with the maps
            layers = (self.shape.layers or 1,)
        return TokenRequest(layers or None)

    def skipped_rows(self, objective: Objective) -> npt.NDArray[np.int64]:
        """Ascending rows that `data.skip_quarantined` leaves out.

        Their vector, or their tokens where those are needed, were refused when the cache was built.
        """
        if not self.config.data.skip_quarantined:
            return np.zeros(0, dtype=np.int64)
        refused = set(self.space.quarantined())
        if objective.needs.tokens and not self.online and self.space.tokens is not None:
            refused |= self.space.tokens.quarantined().keys()
        return np.array(sorted(refused), dtype=np.int64)

    def dataset(
        self, manifest: Manifest, objective: Objective, left_out: npt.NDArray[np.int64] | None = None
    ) -> CachedDataset:
        """The records of a corpus with all that the objective needs of the cache."""
        tokens = None
        if objective.needs.tokens and not self.online:
            needs = objective.needs
            tokens = "attention" if needs.attention or needs.importance else "states"
        return CachedDataset(
            self.cache, self.space, manifest, left_out=left_out, pairs=uses_pairs(objective), tokens=tokens
        )

    def collator(self, manifest: Manifest, objective: Objective, student: Student) -> Collator:
        """What makes batches of these records; an online teacher is loaded here."""
        needs, tokens, online = objective.needs, self.space.tokens, None
        layers: tuple[int, ...] = () if tokens is None else tokens.record.attention or ()
        if self.online and isinstance(self.space, SpaceView):
            from distill.data.online import open_online

            request, teacher = self._request(objective), self.config.teacher
            layers = () if request is None else request.attention or ()
            online = open_online(
                teacher.model,
                self.space.space,
                teacher.device,
                request,
                needs.internals,
                trust_remote_code=teacher.trust_remote_code,
            )
        return Collator(
            student.tokenizer,
            student.max_length,
            prompt=student.prompt,
            repeat=1 if uses_pairs(objective) else needs.views,
            needs=needs,
            restore=None if tokens is None else tokens.restore,
            attention_layers=layers,
            kept_alignments=self._kept_alignments(objective, student),
            domains_of=manifest.domains_of if self.config.sharpness.name in NEED_DOMAINS else None,
            online=online,
        )

    def _kept_alignments(self, objective: Objective, student: Student) -> AlignmentColumn | None:
        """Of this student's tokens, where `tcache align` has made them."""
        method, digest = objective.needs.alignment, student.digests.get("tokenizer")
        if method is None or digest is None or not isinstance(self.space, SpaceView):
            return None
        lower = ignores_case(student.tokenizer)
        settings = AlignmentSettings(method, digest, student.max_length, student.prompt, lower)
        return stored_alignments(self.space, settings)

    def to_json(self) -> dict[str, Any]:
        """The space as `run.json` keeps it; of several ones the names stand side by side."""
        if isinstance(self.space, SpaceView):
            return _described(self.space)
        parts = [_described(part) for part in self.space.spaces]
        return {
            "teacher": " and ".join(part["teacher"] for part in parts),
            "revision": " ".join(filter(None, (part["revision"] for part in parts))),
            "dims": self.space.dims,
            "slug": self.space.slug,
            "fingerprint": "+".join(part["fingerprint"] for part in parts),
            "description": "; ".join(part["description"] for part in parts),
            "storage": "+".join(part["storage"] for part in parts),
            "spaces": parts,
        }


def teacher_shape(space: SpaceView | JointSpace, tokens: TokenShape | None = None) -> TeacherShape:
    """The sizes of a space's teacher for an objective, token by token where the space keeps tokens.

    Args:
        tokens: of the teacher itself, where it is asked rather than the space.
    """
    if isinstance(space, JointSpace):
        return TeacherShape(space.dims, normalized=True)
    if tokens is None and space.tokens is not None:
        tokens = space.tokens.record.shape
    if tokens is None:
        return TeacherShape(space.dims, normalized=space.space.normalize)
    return TeacherShape(
        space.dims,
        normalized=space.space.normalize,
        token_dim=tokens.width,
        layers=tokens.layers,
        heads=tokens.heads,
        causal=tokens.causal,
    )


def _asked(teacher: TeacherConfig) -> TeacherOptions:
    return TeacherOptions(model=teacher.model, trust_remote_code=teacher.trust_remote_code)


def attention_layers(objective: Objective) -> tuple[int, ...]:
    """The teacher's layers whose attention maps the objective compares, ascending."""
    return tuple(sorted({layer for _, layer in objective.needs.attention}))


def require_tokens(who: str, objective: Objective, space: SpaceView | JointSpace) -> TokenColumns:
    """The token columns of a space, if they hold what the objective compares.

    Args:
        who: begins the message.

    Raises:
        NeedsNotMet: naming what is missing and what would bring it.
    """
    needs, layers = objective.needs, attention_layers(objective)
    if isinstance(space, JointSpace):
        raise NeedsNotMet(joint_space_message(who))
    if needs.internals:
        raise NeedsNotMet(
            f"{who} with these options compares every layer of the teacher, head by head, which no cache keeps; use "
            "`distill run` with teacher.mode=online and teacher.model, or leave these terms out"
        )
    columns = "vectors,tokens"
    if layers or needs.importance:
        columns += ",attention" + (f" --attention-layers {','.join(map(str, layers))}" if layers else "")
    hint = f"`tcache build --columns {columns}` with this corpus and teacher adds them"
    if space.tokens is not None and space.tokens.record.attention is not None:
        hint = f"its layers are settled: `tcache build --columns {columns}` into another --cache keeps them"
    if space.tokens is None:
        raise NeedsNotMet(f"{who} needs the teacher's token states, but {space.slug} keeps none; {hint}")
    kept = space.tokens.record.attention
    if (needs.importance and kept is None) or not set(layers) <= set(kept or ()):
        raise NeedsNotMet(
            f"{who} needs the attention of the teacher's layers {list(layers) or 'any'}, but {space.slug} keeps "
            f"{'none' if kept is None else f'those of {list(kept)}'}; {hint}"
        )
    return space.tokens


def joint_space_message(who: str) -> str:
    """Why an objective that compares tokens is refused several spaces."""
    return f"{who} compares tokens, which several spaces do not have in common; name one space"


def uses_pairs(objective: Objective) -> bool:
    """Whether the second view is a record's second text, not the first once more."""
    return objective.views == "pair" and objective.needs.views == 2


def _described(space: SpaceView) -> dict[str, Any]:
    return {
        **space.space.to_json(),
        "slug": space.slug,
        "fingerprint": space.space.fingerprint,
        "description": space.space.describe(),
        "storage": space.record.storage,
    }

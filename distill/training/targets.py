"""The teacher's side of a run: the spaces of its targets, and its token states."""

from typing import Any

import numpy as np
import numpy.typing as npt

from distill.config import RunConfig, TeacherConfig
from distill.data.collator import Collator
from distill.data.dataset import CachedDataset, check_pairs
from distill.errors import ConfigError, NeedsNotMet
from distill.objectives.base import Objective, TeacherShape
from distill.student.student import Student
from distill.training.target_transform import TargetTransform
from teacher_cache.building.align import AlignmentColumn, AlignmentSettings, stored_alignments
from teacher_cache.storage.manifest import Manifest
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import resolve, token_shape
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.teachers.token_offsets import ignores_case
from teacher_cache.tokens.request import TokenRequest, TokenShape
from teacher_cache.tokens.token_columns import TokenColumns

# Sharpness methods that need the domains of a corpus.
NEED_DOMAINS = ("disam",)


class Targets:
    """Targets of a run, from a cache or, with `teacher.mode=online`, from the teacher.

    Attributes:
        space: of the cache; several named spaces are read as one.
        shape: sizes of the teacher, including token states if the space has them or the teacher is online.
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
            raise ConfigError("teacher.mode=online runs one teacher, but several spaces are named; name one space")
        tokens = token_shape(resolve(_teacher_options(config.teacher))) if self.online else None
        self.shape = teacher_shape(self.space, tokens)

    def check(self, objective: Objective, manifest: Manifest) -> None:
        """Check, before anything is written, that the needs of an objective are met."""
        sharpness, corpus = self.config.sharpness, manifest.record
        if sharpness.name in NEED_DOMAINS:
            manifest.domains_of(np.zeros(0, dtype=np.int64))
            if len(corpus.domains) < 2:
                raise NeedsNotMet(
                    f"sharpness {sharpness.name} compares domains, but corpus {corpus.name!r} has only "
                    f"{corpus.domains[0]!r}; use sharpness.name=sam"
                )
        for stage in objective.stages():
            unknown = [term for term in sharpness.ascent_terms or () if stage.terms and term not in stage.terms]
            if unknown:
                raise ConfigError(
                    f"sharpness.ascent_terms: objective {self.config.objective.name} has no term {unknown[0]!r}"
                    f"{' in one of its stages' if stage is not objective else ''}; it has {', '.join(stage.terms)}"
                )
        if uses_pairs(objective):
            check_pairs(manifest)
        if objective.needs.tokens and not self.online:
            require_tokens(f"objective {self.config.objective.name}", objective, self.space)

    def transform(self) -> TargetTransform | None:
        """The transform of `teacher.targets`, not fitted yet; None for unchanged vectors."""
        kind = self.config.teacher.targets
        return None if kind == "none" else TargetTransform(kind, self.shape)

    def _request(self, objective: Objective) -> TokenRequest | None:
        """What an online teacher computes besides vectors."""
        needs = objective.needs
        if not needs.tokens:
            return None
        layers = attention_layers(objective)
        if needs.importance and not layers:  # needs the maps of any layer
            layers = (self.shape.layers or 1,)
        return TokenRequest(layers or None)

    def skipped_rows(self, objective: Objective) -> npt.NDArray[np.int64]:
        """Ascending rows that `data.skip_quarantined` skips: those with a quarantined vector or, if needed, tokens."""
        if not self.config.data.skip_quarantined:
            return np.zeros(0, dtype=np.int64)
        refused = set(self.space.quarantined())
        if objective.needs.tokens and not self.online and self.space.tokens is not None:
            refused |= self.space.tokens.quarantined().keys()
        return np.array(sorted(refused), dtype=np.int64)

    def dataset(
        self, manifest: Manifest, objective: Objective, left_out: npt.NDArray[np.int64] | None = None
    ) -> CachedDataset:
        """The records of a corpus, with what the objective needs from the cache."""
        tokens = None
        if objective.needs.tokens and not self.online:
            needs = objective.needs
            tokens = "attention" if needs.attention or needs.importance else "states"
        return CachedDataset(
            self.cache, self.space, manifest, left_out=left_out, pairs=uses_pairs(objective), tokens=tokens
        )

    def collator(self, manifest: Manifest, objective: Objective, student: Student) -> Collator:
        """The collator of these records; loads an online teacher."""
        needs, tokens, online = objective.needs, self.space.tokens, None
        layers: tuple[int, ...] = () if tokens is None else tokens.record.attention or ()
        if self.online and isinstance(self.space, SpaceView):
            from distill.data.online import load_online_teacher

            request, teacher = self._request(objective), self.config.teacher
            layers = () if request is None else request.attention or ()
            online = load_online_teacher(
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
            stored_alignments=self._kept_alignments(objective, student),
            domains_of=manifest.domains_of if self.config.sharpness.name in NEED_DOMAINS else None,
            online=online,
        )

    def _kept_alignments(self, objective: Objective, student: Student) -> AlignmentColumn | None:
        """Alignments to this student's tokens, if `tcache align` has computed them."""
        method, digest = objective.needs.alignment, student.digests.get("tokenizer")
        if method is None or digest is None or not isinstance(self.space, SpaceView):
            return None
        lower = ignores_case(student.tokenizer)
        settings = AlignmentSettings(method, digest, student.max_length, student.prompt, lower)
        return stored_alignments(self.space, settings)

    def to_json(self) -> dict[str, Any]:
        """The space for `run.json`; of several, joined names and fingerprints."""
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
    """Sizes of a space's teacher for an objective.

    Args:
        tokens: sizes of the token states; None is those of the space, if it has token columns.
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


def _teacher_options(teacher: TeacherConfig) -> TeacherOptions:
    return TeacherOptions(model=teacher.model, trust_remote_code=teacher.trust_remote_code)


def attention_layers(objective: Objective) -> tuple[int, ...]:
    """The teacher's layers whose attention maps the objective compares, ascending."""
    return tuple(sorted({layer for _, layer in objective.needs.attention}))


def require_tokens(who: str, objective: Objective, space: SpaceView | JointSpace) -> TokenColumns:
    """The token columns of a space, checked for what the objective compares."""
    needs, layers = objective.needs, attention_layers(objective)
    if isinstance(space, JointSpace):
        raise NeedsNotMet(joint_space_message(who))
    if needs.internals:
        raise NeedsNotMet(
            f"{who} with these options compares every layer and head of the teacher, which a cache does not hold; use "
            "`distill run` with teacher.mode=online and teacher.model, or set their weights to 0"
        )
    columns = "vectors,tokens"
    if layers or needs.importance:
        columns += ",attention" + (f" --attention-layers {','.join(map(str, layers))}" if layers else "")
    hint = f"`tcache build --columns {columns}` with this corpus and teacher adds them"
    if space.tokens is not None and space.tokens.record.attention is not None:
        hint = f"its layers are fixed; `tcache build --columns {columns}` with another --cache adds them"
    if space.tokens is None:
        raise NeedsNotMet(f"{who} needs the teacher's token states, but {space.slug} has none; {hint}")
    kept = space.tokens.record.attention
    if (needs.importance and kept is None) or not set(layers) <= set(kept or ()):
        raise NeedsNotMet(
            f"{who} needs the attention of the teacher's layers {list(layers) or 'any'}, but {space.slug} has "
            f"{'none' if kept is None else f'those of {list(kept)}'}; {hint}"
        )
    return space.tokens


def joint_space_message(who: str) -> str:
    """Why an objective that compares tokens needs one space."""
    return f"{who} compares tokens, which differ between several spaces; name one space"


def uses_pairs(objective: Objective) -> bool:
    """Whether the second view is the second text of a record."""
    return objective.views == "pair" and objective.needs.views == 2


def _described(space: SpaceView) -> dict[str, Any]:
    return {
        **space.space.to_json(),
        "slug": space.slug,
        "fingerprint": space.space.fingerprint,
        "description": space.space.describe(),
        "storage": space.record.storage,
    }

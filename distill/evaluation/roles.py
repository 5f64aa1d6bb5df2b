"""Encoders by role: of the evaluated model, and of the teacher that it is compared with."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.errors import EvaluationError
from distill.evaluation.base import DOCUMENT, QUERY, TEACHER, TEACHER_DOCUMENT, TEACHER_QUERY, TEXT, Announce, silent
from distill.evaluation.encoders import CachedEncoder, ModelEncoder, ModelSlot, options_by_role, resolved_dtype
from distill.run_folder import FINAL, RECORD, read_record, recorded_space
from teacher_cache.space import LABELS, EmbeddingSpace
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import CACHE_JSON
from teacher_cache.teachers import TeacherOptions, resolve, resolve_for_space
from teacher_cache.teachers.settings import options_for_space

SpaceEncoder = CachedEncoder | ModelEncoder

# What to do about a student that is not in its teacher's space.
ADVICE = "train with export.projection=true to compare them"
# Role of the teacher -> the role of a model that it encodes as.
MODEL_ROLES = {TEACHER: TEXT, TEACHER_QUERY: QUERY, TEACHER_DOCUMENT: DOCUMENT}


@dataclass(frozen=True, kw_only=True)
class TeacherSource:
    """Source of a teacher's vectors: a cache, a model, or a cache that the model fills.

    Attributes:
        space: how the teacher encodes: name of a space of the cache, or the space itself, as a run recorded it. None is
            the cache's only one or, with a model, that of the model's own files.
        model: encodes what the cache lacks; without a cache, everything.
        query_prompt, document_prompt: None takes those that the model's files name, else the space's own prompt.
    """

    cache: Path | None = None
    space: str | EmbeddingSpace | None = None
    model: TeacherOptions | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None

    def for_run(self, record: Mapping[str, Any]) -> "TeacherSource":
        """The same with the cache and the space of a run's record as defaults."""
        space = self.space or recorded_space(record)
        if space is None:
            raise EvaluationError(
                f"the run was trained on several spaces, {record['space']['slug']}; name the one to compare with "
                "(`space`)"
            )
        return replace(self, cache=self.cache or Path(record["cache"]), space=space)


def run_record(model: str) -> dict[str, Any] | None:
    """The record of the run that trained a model, given the run's folder or the student's; None for other models."""
    folder = Path(model).expanduser()
    if not (folder / RECORD).is_file() and folder.resolve().name == FINAL:
        folder = folder.resolve().parent
    return read_record(folder)


def model_encoders(
    options: TeacherOptions,
    roles: Iterable[str],
    *,
    cache: Path | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    announce: Announce = silent,
) -> dict[str, SpaceEncoder]:
    """Encoders of the evaluated model by role; roles with equal settings share one.

    Unless `options.normalize` is set, vectors are taken before any normalization. The precision "auto" is resolved by
    `resolved_dtype`.
    """
    by_role = options_by_role(options, query_prompt, document_prompt)
    normalize = options.normalize if options.normalize is not None else False
    wanted = {role: replace(by_role[role], normalize=normalize) for role in by_role if role in set(roles)}
    # A cached space decides the precision of a teacher only, not of the evaluated model.
    return _encoders(_resolve_dtypes(wanted), cache, announce)


def teacher_encoders(
    source: TeacherSource, roles: Iterable[str], announce: Announce = silent
) -> dict[str, SpaceEncoder]:
    """Encoders of the teacher by role; roles with equal settings share one.

    Raises:
        EvaluationError: there is neither a cache nor a model.
        CacheError, TeacherError: no such space or model; a `SpaceMismatch` if the space is of another model, or no
            space has the prompt.
    """
    wanted = [role for role in MODEL_ROLES if role in set(roles)]
    if not wanted:
        return {}
    if source.model is not None and source.space is None:
        by_role = options_by_role(source.model, source.query_prompt, source.document_prompt)
        return _encoders({role: by_role[MODEL_ROLES[role]] for role in wanted}, source.cache, announce)
    if source.cache is not None:
        return _space_encoders(source.cache, source, wanted, announce)
    raise EvaluationError(
        "the teacher's vectors are needed: name a cache that holds them (`cache`, and `space` if it has several), the "
        "model (`teacher`), or both"
    )


def _space_encoders(
    cache: Path, source: TeacherSource, wanted: Sequence[str], announce: Announce
) -> dict[str, SpaceEncoder]:
    """Encoders of a cached space, and of the same space with other prompts; filled by the model if there is one."""
    space = source.space
    if not isinstance(space, EmbeddingSpace):
        with TeacherCache.open(cache) as table:
            space = table.space_record(space).space
    given = {TEXT: None, QUERY: source.query_prompt, DOCUMENT: source.document_prompt}
    if source.model is not None:
        resolve_for_space(space, source.model)  # raises for another model, which would get a space of its own
        by_role = options_by_role(source.model, source.query_prompt, source.document_prompt)
        given = {role: by_role[role].prompt for role in given}
    prompts = {role: space.prompt if (own := given[MODEL_ROLES[role]]) is None else own for role in wanted}
    if source.model is not None:
        options = options_for_space(space, source.model)
        return _encoders({role: replace(options, prompt=prompts[role]) for role in wanted}, cache, announce)
    fields = {name: value for name, value in space.to_json().items() if name not in LABELS}
    return _shared({role: CachedEncoder(cache, fields | {"prompt": prompts[role]}) for role in wanted}, announce)


def require_teacher_space(model: str) -> None:
    """Check that a run's student is in its teacher's space."""
    record = run_record(model)
    if record is not None and not record.get("in_teacher_space"):
        raise EvaluationError(
            f"{model} is not in its teacher's space, so its vectors cannot be compared with the teacher's: {ADVICE}"
        )


def require_comparable(model: str, own: EmbeddingSpace, teacher: EmbeddingSpace) -> None:
    """Check that a model's vectors can be compared with the teacher's."""
    recorded = recorded_space(run_record(model) or {})
    if recorded is not None and recorded.weights != teacher.weights:
        raise EvaluationError(
            f"{model} was trained on {recorded.teacher}, so its vectors cannot be compared with those of "
            f"{teacher.teacher}: name its own teacher"
        )
    if own.dims != teacher.dims:
        raise EvaluationError(
            f"{model} has vectors of {own.dims} dimensions and {teacher.teacher} of {teacher.dims}, so they cannot be "
            f"compared: {ADVICE}"
        )


def _encoders(by_role: Mapping[str, TeacherOptions], cache: Path | None, announce: Announce) -> dict[str, SpaceEncoder]:
    by_role = _resolve_dtypes(by_role, cache)
    if cache is not None:
        cached = {role: CachedEncoder(cache, teacher=options, announce=announce) for role, options in by_role.items()}
        return _shared(cached, announce)
    slot = ModelSlot()
    return _shared({role: ModelEncoder(resolve(options), slot) for role, options in by_role.items()}, announce)


def _resolve_dtypes(by_role: Mapping[str, TeacherOptions], cache: Path | None = None) -> dict[str, TeacherOptions]:
    """The options with one precision in place of "auto": that of a space of the cache, else `resolved_dtype`."""
    specs = [resolve(options) for options in by_role.values() if options.dtype == "auto"]
    if not specs:
        return dict(by_role)
    cached: list[str] = []
    if cache is not None and (cache / CACHE_JSON).exists():
        with TeacherCache.open(cache) as table:
            cached = [view.space.dtype for spec in specs if (view := table.find_space(spec.space)) is not None]
    # A teacher without files has its own precision.
    dtype = cached[0] if cached else "float32" if specs[0].folder is None else resolved_dtype("auto")
    return {
        role: replace(options, dtype=dtype) if options.dtype == "auto" else options for role, options in by_role.items()
    }


def _shared(encoders: Mapping[str, SpaceEncoder], announce: Announce) -> dict[str, SpaceEncoder]:
    """One encoder for all roles of a space, so that no text is encoded twice; each space is announced."""
    by_space: dict[EmbeddingSpace, SpaceEncoder] = {}
    for role, encoder in encoders.items():
        if encoder.space not in by_space:
            by_space[encoder.space] = encoder
            roles = [other for other, one in encoders.items() if one.space == encoder.space]
            several = len(roles) < len(encoders) or role in MODEL_ROLES
            announce((f"{', '.join(roles)}: " if several else "") + encoder.space.describe())
    return {role: by_space[encoder.space] for role, encoder in encoders.items()}

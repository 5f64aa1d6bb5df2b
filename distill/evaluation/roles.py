"""Who gives the vectors of each role: the evaluated model, and the teacher that it may be measured against."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.errors import EvaluationError
from distill.evaluation.base import DOCUMENT, QUERY, TEACHER, TEACHER_DOCUMENT, TEACHER_QUERY, TEXT
from distill.evaluation.encoders import CachedEncoder, ModelEncoder, Room, asked_by_role, resolved_dtype
from distill.run_folder import FINAL, RECORD, read_record, recorded_space
from teacher_cache.space import LABELS, EmbeddingSpace
from teacher_cache.table.cache import CACHE_JSON, TeacherCache
from teacher_cache.teachers import TeacherOptions, resolve, resolve_as
from teacher_cache.teachers.settings import asked_as

Announce = Callable[[str], None]
SpaceEncoder = CachedEncoder | ModelEncoder

# What there is to do about a student that did not end in its teacher's space.
ADVICE = "train with export.projection=true; without the asymmetric mode and approximation it can be evaluated as it is"
# Role of the teacher -> the role of a model that is asked so.
AS_MODEL = {TEACHER: TEXT, TEACHER_QUERY: QUERY, TEACHER_DOCUMENT: DOCUMENT}


@dataclass(frozen=True, kw_only=True)
class TeacherSource:
    """Where a teacher's vectors come from: a cache, a model, or a cache that the model fills.

    Attributes:
        space: how it is asked: a name of a space of the cache, or the space itself, as a run recorded it. None is the
            cache's only one or, with a model, as the model's own files say.
        model: asked for what the cache lacks; for everything without a cache.
        query_prompt, document_prompt: None takes what the model's files name, else the space's own prompt.
    """

    cache: Path | None = None
    space: str | EmbeddingSpace | None = None
    model: TeacherOptions | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None

    def of_run(self, record: Mapping[str, Any]) -> "TeacherSource":
        """With the cache and the space of a run's record, where they are not said otherwise.

        Raises:
            EvaluationError: it has several teachers side by side, and none is named.
        """
        space = self.space or recorded_space(record)
        if space is None:
            raise EvaluationError(
                f"the run learnt from {record['space']['slug']}, several spaces side by side; name the one whose "
                "vectors are to be the teacher's (--space)"
            )
        return replace(self, cache=self.cache or Path(record["cache"]), space=space)


def run_record(model: str) -> dict[str, Any] | None:
    """The record of the run that a model is the student of, given the run's folder or the student's; else None."""
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
    announce: Announce = lambda line: None,
) -> dict[str, SpaceEncoder]:
    """An encoder of the evaluated model for each of its roles; equal ways of asking share one.

    Unless `options.normalize` says otherwise, vectors are taken before any normalisation. An "auto" precision is
    settled as `resolved_dtype` does.

    Args:
        cache: where its vectors are kept; None keeps none.
        query_prompt, document_prompt: see `asked_by_role`.

    Raises:
        TeacherError, CacheError: no such model, or a cache that is none.
    """
    asked = asked_by_role(options, query_prompt, document_prompt)
    unnormalised = options.normalize if options.normalize is not None else False
    wanted = {
        role: replace(asked[role], normalize=unnormalised) for role in (TEXT, QUERY, DOCUMENT) if role in set(roles)
    }
    # Of a teacher, a space that is there decides on an open precision; of the evaluated model always the rule.
    return _encoders(_settled(wanted), cache, announce)


def teacher_encoders(
    source: TeacherSource, roles: Iterable[str], announce: Announce = lambda line: None
) -> dict[str, SpaceEncoder]:
    """An encoder of the teacher for each of its roles; equal ways of asking share one.

    Raises:
        EvaluationError: there is neither a cache nor a model.
        CacheError, TeacherError: no such space or model; a `SpaceMismatch` if the model is not the one that the space
            is of, or no space has the prompt.
    """
    wanted = [role for role in AS_MODEL if role in set(roles)]
    if not wanted:
        return {}
    if source.model is not None and source.space is None:
        asked = asked_by_role(source.model, source.query_prompt, source.document_prompt)
        return _encoders({role: asked[AS_MODEL[role]] for role in wanted}, source.cache, announce)
    if source.cache is not None:
        return _of_space(source.cache, source, wanted, announce)
    raise EvaluationError(
        "the teacher's vectors are needed, and nothing gives them: name a cache that holds them (--cache, and --space "
        "if it has several), the model (--teacher), or both"
    )


def _of_space(cache: Path, source: TeacherSource, wanted: Sequence[str], announce: Announce) -> dict[str, SpaceEncoder]:
    """Encoders of a space of a cache, and of what it is in other prompts; the model fills it, where there is one."""
    space = source.space
    if not isinstance(space, EmbeddingSpace):
        with TeacherCache.open(cache) as table:
            space = table.space_record(space).space
    given = {TEXT: None, QUERY: source.query_prompt, DOCUMENT: source.document_prompt}
    if source.model is not None:
        resolve_as(space, source.model)  # another model is refused, and not given a space of its own
        asked = asked_by_role(source.model, source.query_prompt, source.document_prompt)
        given = {role: asked[role].prompt for role in given}
    prompts = {role: space.prompt if (own := given[AS_MODEL[role]]) is None else own for role in wanted}
    if source.model is not None:
        options = asked_as(space, source.model)
        return _encoders({role: replace(options, prompt=prompts[role]) for role in wanted}, cache, announce)
    fields = {name: value for name, value in space.to_json().items() if name not in LABELS}
    return _shared({role: CachedEncoder(cache, fields | {"prompt": prompts[role]}) for role in wanted}, announce)


def require_teacher_space(model: str) -> None:
    """
    Raises:
        EvaluationError: the model is the student of a run that did not end in its teacher's space.
    """
    record = run_record(model)
    if record is not None and not record.get("in_teacher_space"):
        raise EvaluationError(
            f"{model} is not in its teacher's space, so its vectors cannot be compared with the teacher's: {ADVICE}"
        )


def require_one_space(model: str, mine: EmbeddingSpace, theirs: EmbeddingSpace) -> None:
    """
    Raises:
        EvaluationError: vectors of the model cannot be compared with the teacher's, as their widths differ or the model
            is the student of a run that had another teacher.
    """
    learnt = recorded_space(run_record(model) or {})
    if learnt is not None and learnt.weights != theirs.weights:
        raise EvaluationError(
            f"{model} learnt from {learnt.teacher}, so its vectors cannot be compared with those of {theirs.teacher}: "
            "name its own teacher"
        )
    if mine.dims != theirs.dims:
        raise EvaluationError(
            f"{model} gives vectors of {mine.dims} numbers and {theirs.teacher} of {theirs.dims}, so they cannot be "
            f"compared: {ADVICE}"
        )


def _encoders(asked: Mapping[str, TeacherOptions], cache: Path | None, announce: Announce) -> dict[str, SpaceEncoder]:
    asked = _settled(asked, cache)
    if cache is not None:
        kept = {role: CachedEncoder(cache, teacher=options, announce=announce) for role, options in asked.items()}
        return _shared(kept, announce)
    room = Room()
    return _shared({role: ModelEncoder(resolve(options), room) for role, options in asked.items()}, announce)


def _settled(asked: Mapping[str, TeacherOptions], cache: Path | None = None) -> dict[str, TeacherOptions]:
    """The same in one precision in place of "auto": that of a space of the cache, else by rule, never measured."""
    specs = [resolve(options) for options in asked.values() if options.dtype == "auto"]
    if not specs:
        return dict(asked)
    held: list[str] = []
    if cache is not None and (cache / CACHE_JSON).exists():
        with TeacherCache.open(cache) as table:
            held = [view.space.dtype for spec in specs if (view := table.find_space(spec.space)) is not None]
    # A teacher without files has its own.
    dtype = held[0] if held else "float32" if specs[0].folder is None else resolved_dtype("auto")
    return {
        role: replace(options, dtype=dtype) if options.dtype == "auto" else options for role, options in asked.items()
    }


def _shared(encoders: Mapping[str, SpaceEncoder], announce: Announce) -> dict[str, SpaceEncoder]:
    """One encoder for all roles of one space, so that no text is encoded twice; says how each is asked."""
    by_space: dict[EmbeddingSpace, SpaceEncoder] = {}
    for role, encoder in encoders.items():
        if encoder.space not in by_space:
            by_space[encoder.space] = encoder
            roles = [other for other, one in encoders.items() if one.space == encoder.space]
            several = len(roles) < len(encoders) or role in AS_MODEL
            announce((f"{', '.join(roles)}: " if several else "") + encoder.space.describe())
    return {role: by_space[encoder.space] for role, encoder in encoders.items()}

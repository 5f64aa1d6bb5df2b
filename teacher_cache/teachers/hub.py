"""Where a model's files are: a local folder, the hub's cache, or the hub."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from teacher_cache.errors import TeacherError, optional_import
from teacher_cache.teachers.families import FAMILIES, nearest_names
from teacher_cache.teachers.folder import RUN_RECORD, STUDENT, ModelFolder

# Everything a teacher reads, sub-folders included; pickled weights are added where there are no others.
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm"]
# Exports for other runtimes would match the patterns above.
_IGNORED = ["onnx/*", "openvino/*", "original/*", "*/onnx/*", "*/openvino/*"]


def find_folder(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """The local folder of `model`: a path, a known family's short name, or a hub id.

    The path of a finished run means its student: a student is a teacher like any other.

    The hub's cache answers before the hub: a model that was downloaded once keeps its commit until
    `revision` asks for another, and needs no network.

    Raises:
        TeacherError: `model` is none of these, or cannot be fetched.
        MissingDependency: a hub id without huggingface_hub.
    """
    local = Path(model).expanduser()
    if model and local.is_dir():
        if revision is not None:
            raise TeacherError(f"revision {revision!r} was given for the local folder {model}: leave it out")
        return student_of(local.resolve())
    if model.startswith((".", "~", "/")) or "\\" in model or model.count("/") > 1 or not model:
        raise TeacherError(f"no folder at {model!r}: check the path, or give a hub id such as BAAI/bge-m3")
    family = FAMILIES.get(model.lower())
    return _from_hub(model, family.hub_id if family else model, revision, trust_remote_code)


def student_of(folder: Path) -> Path:
    """The student in a run folder; any other folder as it is.

    Raises:
        TeacherError: the run has not finished.
    """
    if not (folder / RUN_RECORD).is_file():
        return folder
    if not (folder / STUDENT).is_dir():
        raise TeacherError(f"the run in {folder} has left no student yet: no {STUDENT}; finish it first")
    return folder / STUDENT


def _from_hub(asked: str, hub_id: str, revision: str | None, trust_remote_code: bool) -> Path:
    with optional_import(f"teacher {asked!r} is not a local folder, and downloading it"):
        import huggingface_hub
        from huggingface_hub import constants

    patterns = [*_PATTERNS, "*.py"] if trust_remote_code else _PATTERNS
    try:
        cached = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, local_files_only=True))
        ModelFolder.open(cached)
        return cached
    except (OSError, ValueError) as absent_or_incomplete:
        # Offline nothing better is to come: what the cache lacks is the answer.
        if constants.HF_HUB_OFFLINE and isinstance(absent_or_incomplete, TeacherError):
            raise
    try:
        pickled = _pickles_needed(huggingface_hub.list_repo_files(hub_id, revision=revision))
        folder = Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=[*patterns, *pickled], ignore_patterns=_IGNORED
            )
        )
        if trust_remote_code:
            _fetch_code(folder)
        return folder
    # The hub's client raises OSError, ValueError and its HTTP library's own errors for one and the same
    # thing: the model did not arrive.
    except Exception as error:
        raise TeacherError(_not_found(asked, error, offline=constants.HF_HUB_OFFLINE)) from error


def _pickles_needed(names: Iterable[str]) -> list[str]:
    """Of a repository's files, PyTorch's weights that lie in folders without safetensors."""
    paths = [PurePosixPath(name) for name in names]
    safe = {path.parent for path in paths if path.suffix == ".safetensors"}
    return [str(path) for path in paths if fnmatch(path.name, "pytorch_model*.bin") and path.parent not in safe]


def _fetch_code(folder: Path) -> None:
    """Fetch the repositories that auto_map ("owner/name--file.Class") takes its code from."""
    import huggingface_hub

    auto_map = ModelFolder(folder).config.get("auto_map") or {}
    for repository in {str(v).split("--", 1)[0] for v in auto_map.values() if "--" in str(v)}:
        huggingface_hub.snapshot_download(repository, allow_patterns=["*.py"])


def _not_found(asked: str, error: Exception, *, offline: bool) -> str:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    if offline:
        reason = ["HF_HUB_OFFLINE is set and the hub's cache does not hold it"]
    near = nearest_names(asked)
    names = ", ".join(near) if near else f"{', '.join(list(FAMILIES)[:3])}, ..."
    return (
        f"unknown model {asked!r}: not a folder, not one of the known names ({names}), "
        f"and not found on the hub ({reason[0][:200].rstrip(' .')})"
    )

"""Finding a model's files: in a local folder, in the hub's cache, or on the hub."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from teacher_cache.errors import TeacherError, optional_import
from teacher_cache.teachers.families import FAMILIES, similar_names
from teacher_cache.teachers.folder import RUN_RECORD, STUDENT, ModelFolder

# Files that a teacher reads, in subfolders too. Pickled weights are added where there are no safetensors.
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm"]
# Exports for other runtimes, which match the patterns above.
_IGNORED = ["onnx/*", "openvino/*", "original/*", "*/onnx/*", "*/openvino/*"]


def find_folder(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """The local folder of `model`: a path, the short name of a known family, or a hub id.

    The path of a finished run stands for its student. A model in the hub's cache is not downloaded again: it keeps its
    commit, without network, until another `revision` is given.
    """
    local = Path(model).expanduser()
    if model and local.is_dir():
        if revision is not None:
            raise TeacherError(f"`revision` is {revision!r}, but {model} is a local folder: leave it out")
        folder = local.resolve()
        if not (folder / RUN_RECORD).is_file():
            return folder
        if not (folder / STUDENT).is_dir():
            raise TeacherError(f"the run in {folder} has not finished: no {STUDENT}/, expected the trained student")
        return folder / STUDENT
    if model.startswith((".", "~", "/")) or "\\" in model or model.count("/") > 1 or not model:
        raise TeacherError(f"no folder at {model!r}: check the path, or give a hub id such as BAAI/bge-m3")
    family = FAMILIES.get(model.lower())
    return _from_hub(model, family.hub_id if family else model, revision, trust_remote_code)


def _from_hub(model: str, hub_id: str, revision: str | None, trust_remote_code: bool) -> Path:
    with optional_import(f"{model!r} is not a local folder, and downloading it"):
        import huggingface_hub
        from huggingface_hub import constants

    patterns = [*_PATTERNS, "*.py"] if trust_remote_code else _PATTERNS
    try:
        cached = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, local_files_only=True))
        ModelFolder.open(cached)
        return cached
    except (OSError, ValueError) as error:
        # An incomplete snapshot: without network it cannot be completed.
        if constants.HF_HUB_OFFLINE and isinstance(error, TeacherError):
            raise
    try:
        pickled = _needed_pickles(huggingface_hub.list_repo_files(hub_id, revision=revision))
        folder = Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=[*patterns, *pickled], ignore_patterns=_IGNORED
            )
        )
        if trust_remote_code:
            _download_code(folder)
        return folder
    # A failed download raises OSError, ValueError or the errors of the hub's HTTP library.
    except Exception as error:
        raise TeacherError(_not_found(model, error, offline=constants.HF_HUB_OFFLINE)) from error


def _needed_pickles(names: Iterable[str]) -> list[str]:
    """Pickled weights of a repository in folders without safetensors."""
    paths = [PurePosixPath(name) for name in names]
    safe = {path.parent for path in paths if path.suffix == ".safetensors"}
    return [str(path) for path in paths if fnmatch(path.name, "pytorch_model*.bin") and path.parent not in safe]


def _download_code(folder: Path) -> None:
    """Download the repositories of the code in auto_map ("owner/name--file.Class")."""
    import huggingface_hub

    auto_map = ModelFolder(folder).config.get("auto_map") or {}
    for repository in {str(v).split("--", 1)[0] for v in auto_map.values() if "--" in str(v)}:
        huggingface_hub.snapshot_download(repository, allow_patterns=["*.py"])


def _not_found(model: str, error: Exception, *, offline: bool) -> str:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    if offline:
        reason = ["HF_HUB_OFFLINE is set and the model is not in the hub's cache"]
    names = ", ".join(similar_names(model)) or f"{', '.join(list(FAMILIES)[:3])}, ..."
    return (
        f"unknown model {model!r}: not a folder, not one of the known names ({names}), "
        f"and not found on the hub ({reason[0][:200].rstrip(' .')})"
    )

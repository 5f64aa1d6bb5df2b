"""Every error this package raises on purpose.

Each message is one line: what is wrong, where, what was found and expected, what to do next. The command
line prints it and exits with `exit_code`; nothing else catches them.
"""


class KnownError(Exception):
    """Root of the errors that are answers to bad input or a bad state, not defects."""

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
    """An optional library is absent; the message names the extra that brings it."""


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


class MissingRows(CacheError, LookupError):
    """Rows that a space does not hold were asked for."""


class DamagedCache(CacheError, OSError):
    """Bytes on disk are not what the index says they are."""


class DiskFull(CacheError, OSError):
    """The disk filled up while writing; what was committed before is intact."""

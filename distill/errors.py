"""Known errors of this package, see `teacher_cache.errors`."""

from teacher_cache.errors import KnownError


class DistillError(KnownError):
    """Base of the known errors of this package."""


class ConfigError(DistillError, ValueError):
    """An invalid run configuration; the message names the key."""


class StudentError(DistillError, ValueError):
    """A student cannot be found or loaded."""


class NeedsNotMet(DistillError, ValueError):
    """An objective needs something that the cache, the teacher or the student lacks."""


class RunFolderError(DistillError, ValueError):
    """A run folder does not fit the command."""


class SearchError(DistillError, RuntimeError):
    """A search has no candidate left."""


class NonFiniteLoss(DistillError, ArithmeticError):
    """A loss or its curvature is NaN or infinite."""


class EvaluationError(DistillError, ValueError):
    """Files of a task are missing or malformed."""


class ExportError(DistillError, RuntimeError):
    """An exported student gives other vectors than the trained one."""

    exit_code = 3

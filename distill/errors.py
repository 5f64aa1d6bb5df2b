"""Every error this package raises on purpose; one line each, see `teacher_cache.errors`."""

from teacher_cache.errors import KnownError


class DistillError(KnownError):
    """Root of this package's known errors."""


class ConfigError(DistillError, ValueError):
    """A run configuration that cannot be used; the message names the key."""


class StudentError(DistillError, ValueError):
    """A student that cannot be found or loaded."""


class NeedsNotMet(DistillError, ValueError):
    """An objective needs something that the cache or the student does not have."""


class RunFolderError(DistillError, ValueError):
    """A run folder that does not fit the command."""


class NonFiniteLoss(DistillError, ArithmeticError):
    """A loss became NaN or infinite; training stops instead of going on with broken weights."""


class EvaluationError(DistillError, ValueError):
    """A task whose files are missing or malformed."""


class ExportError(DistillError, RuntimeError):
    """An exported student does not give the vectors that the trained one gave."""

    exit_code = 3

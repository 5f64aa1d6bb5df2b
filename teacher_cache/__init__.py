"""Teacher vectors of texts, computed once and stored in a cache that many experiments read.

Names are imported on first use: `import teacher_cache` loads no heavy library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teacher_cache.building.build import BuildReport as BuildReport
    from teacher_cache.building.build import build as build
    from teacher_cache.building.workers import LocalWorkers as LocalWorkers
    from teacher_cache.building.workers import RayWorkers as RayWorkers
    from teacher_cache.corpus.corpus import Corpus as Corpus
    from teacher_cache.errors import KnownError as KnownError
    from teacher_cache.reading.dataset import VectorDataset as VectorDataset
    from teacher_cache.reading.shuffle import WindowedShuffle as WindowedShuffle
    from teacher_cache.reading.stream import WindowedReader as WindowedReader
    from teacher_cache.space import EmbeddingSpace as EmbeddingSpace
    from teacher_cache.table.cache import TeacherCache as TeacherCache
    from teacher_cache.table.view import SpaceView as SpaceView
    from teacher_cache.teachers import TeacherOptions as TeacherOptions
    from teacher_cache.teachers import load_teacher as load_teacher

__version__ = "0.1.0"

# Public name -> module that defines it.
_PUBLIC = {
    "BuildReport": "teacher_cache.building.build",
    "Corpus": "teacher_cache.corpus.corpus",
    "EmbeddingSpace": "teacher_cache.space",
    "KnownError": "teacher_cache.errors",
    "LocalWorkers": "teacher_cache.building.workers",
    "RayWorkers": "teacher_cache.building.workers",
    "SpaceView": "teacher_cache.table.view",
    "TeacherCache": "teacher_cache.table.cache",
    "TeacherOptions": "teacher_cache.teachers",
    "VectorDataset": "teacher_cache.reading.dataset",
    "WindowedReader": "teacher_cache.reading.stream",
    "WindowedShuffle": "teacher_cache.reading.shuffle",
    "build": "teacher_cache.building.build",
    "load_teacher": "teacher_cache.teachers",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_PUBLIC[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)

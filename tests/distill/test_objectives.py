import subprocess
import sys
from pathlib import Path

import pytest

from distill.errors import ConfigError
from distill.objectives import OBJECTIVES, load_objective
from distill.objectives.base import Objective
from distill.objectives.talas import Talas
from distill.registry import description


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_of_the_table_loads(name: str) -> None:
    assert issubclass(load_objective(name), Objective)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_has_a_description(name: str) -> None:
    line = description(load_objective(name))
    assert line.endswith(".")
    assert 40 < len(line) <= 117


def test_a_class_outside_the_table_loads_by_module_and_name() -> None:
    assert load_objective("distill.objectives.talas:Talas") is Talas


def test_a_misspelled_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'tallas'; did you mean 'talas'"):
        load_objective("tallas")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known: .*simcse.*talas"):
        load_objective("zzz")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("distill.objectives.nowhere:Talas", "found no module 'distill.objectives.nowhere'"),
        ("nowhere.at.all:Talas", "found no module 'nowhere.at.all'"),
        ("distill.objectives.talas:Nothing", "has no 'Nothing'"),
        ("distill.objectives.base:Needs", "must name a subclass"),
        ("distill.objectives.base:unit", "must name a subclass"),
    ],
)
def test_an_import_that_is_not_an_objective_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_objective(name)


def test_a_missing_import_inside_a_method_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_method_of_mine.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        load_objective("a_method_of_mine:Mine")


def test_reading_the_table_does_not_import_torch() -> None:
    code = "import sys, distill.objectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

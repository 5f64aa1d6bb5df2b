"""`tcache doctor`: what it reports of libraries, without importing them."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from teacher_cache.maintenance.doctor import REQUIRED, examine, extras

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Extras for the development of this project, not for its users.
FOR_DEVELOPMENT = {"bench", "dev"}


def test_every_extra_of_the_project_is_listed_once() -> None:
    listed = [finding.what.removeprefix("extra ") for finding in examine() if finding.what.startswith("extra ")]
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"].keys() - FOR_DEVELOPMENT)


def test_every_required_library_of_the_project_is_checked() -> None:
    assert {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]} == set(REQUIRED)


def test_a_missing_library_comes_with_the_command_that_installs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("mteb", "scipy"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    details = {finding.what: finding.detail for finding in extras()}
    assert details["extra mteb"] == "missing: mteb; pip install 'teacher-cache[mteb]'"
    assert details["extra eval"] == (
        "installed: jinja2 1.0, matplotlib 1.0, scikit-learn 1.0; missing: scipy; pip install 'teacher-cache[eval]'"
    )
    assert details["extra ray"] == "installed: ray 1.0"
    assert all(finding.ok for finding in extras())  # nothing that is optional is required


def test_optional_libraries_are_not_imported_to_list_them() -> None:
    script = (
        "import sys\n"
        "from teacher_cache.errors import EXTRAS\n"
        "from teacher_cache.maintenance.doctor import extras\n"
        "list(extras())\n"
        "print(sorted(sys.modules.keys() & EXTRAS.keys()))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"

"""The default cache of the commands, which must not be the user's."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def tcache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`TCACHE_HOME`, a folder that does not exist yet."""
    monkeypatch.setenv("TCACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"

"""`distill.runs.listing`: names with descriptions, without importing what they name."""

import subprocess
import sys

import pytest

from distill.objectives import OBJECTIVES, load_objective
from distill.runs.listing import KINDS, describe
from distill.sharpness import PRESETS


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_a_description_of_one_line(kind: str) -> None:
    found = describe(kind)
    assert found
    assert all(description and "\n" not in description for description in found.values())


def test_parsed_tables_equal_the_imported_ones() -> None:
    assert describe("sharpness").keys() == {"none", *PRESETS}
    assert all(describe("sharpness")[name] == preset.description for name, preset in PRESETS.items())
    presets = {f"{name}:{preset}" for name in OBJECTIVES for preset in load_objective(name).presets}
    assert describe("presets").keys() == presets


def test_listing_works_without_torch_and_the_optional_libraries() -> None:
    code = """
import sys
for name in ("torch", "transformers", "sklearn", "scipy", "sentence_transformers", "safetensors"):
    sys.modules[name] = None
from distill.runs.listing import KINDS, describe
print(all(describe(kind) for kind in KINDS))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "True\n", result.stderr

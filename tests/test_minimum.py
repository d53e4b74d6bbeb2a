"""The lowest versions that pyproject.toml allows, as `make test-minimum` takes them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_dependency_has_a_floor_and_a_constraint():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    every = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    outside = [each for each in every if not each.startswith("opgrad[")]
    command = [sys.executable, ROOT / "tools" / "minimum.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+", line) for line in printed)
    assert [line.partition("==")[0] for line in printed] == [re.match(r"[\w.-]+", each)[0] for each in outside]

"""What is fuzzed takes the files that it starts from, what was found once, and seeded damage, without the fuzzer."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from damage import damaged_bytes

FOLDER = Path(__file__).parents[1] / "tools" / "fuzz"
KNOWN = Path(__file__).parent / "data" / "fuzz"
DAMAGED = 40  # inputs for each target


def loaded():
    """The tool's main file, whose neighbours it imports by their names."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("fuzz", FOLDER / "__main__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


fuzz = loaded()


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_what_the_fuzzer_starts_from_is_taken(name):
    seeds = list(fuzz.TARGETS[name].seeds())
    assert seeds
    for content in seeds:
        fuzz.TARGETS[name].read(content)  # raises nothing


@pytest.mark.filterwarnings("ignore")  # NumPy's, about numbers
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_damage_is_refused(name):
    chance = random.Random(name)
    seeds = list(fuzz.TARGETS[name].seeds())
    for _ in range(DAMAGED):
        fuzz.attempt(fuzz.TARGETS[name], damaged_bytes(chance.choice(seeds), chance))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(KNOWN.glob("*/*")), ids=lambda path: f"{path.parent.name} {path.name}")
def test_what_was_found(path):
    fuzz.attempt(fuzz.TARGETS[path.parent.name], path.read_bytes())


def test_every_find_belongs_to_a_target():
    assert {path.name for path in KNOWN.iterdir()} <= fuzz.TARGETS.keys()

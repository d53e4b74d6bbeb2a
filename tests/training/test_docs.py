"""The examples of docs/guides/training.md run, in the order in which they stand there."""

import re
import shlex
from pathlib import Path

import pytest
from artifact_sets import EXAMPLES
from command import cli

import opgrad
from opgrad.training.run.recipe import Recipe

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "training.md"
BLOCKS = re.compile(r"^```(python|toml|)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(EXAMPLES, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    before = opgrad.get_num_threads()
    opgrad.set_num_threads(1)
    yield tmp_path
    opgrad.set_num_threads(before)


def test_every_example_runs(folder):
    names = {}
    commands = 0
    for kind, text in BLOCKS.findall(DOCUMENT.read_text(encoding="utf-8")):
        if kind == "python":
            exec(text, names)  # each goes on where the one before ended
        for line in text.splitlines() if not kind else []:
            program, *words = shlex.split(line)
            if program == "opgrad" and "my_model" not in words:
                status, text = cli(*words)
                assert status == 0, (line, text)
                commands += 1
    assert commands >= 10
    assert (folder / "runs" / "first" / "best.checkpoint").is_file()
    assert (folder / "model.onnx").is_file()


def test_the_recipe_of_the_document_is_read(tmp_path):
    (text,) = (text for kind, text in BLOCKS.findall(DOCUMENT.read_text(encoding="utf-8")) if kind == "toml")
    (tmp_path / "recipe.toml").write_text(text)
    recipe = Recipe.load(tmp_path)
    assert (recipe.test_rows, recipe.schedule, recipe.divide) == (297, "linear", {"pixels": 16})


def test_the_reference_has_every_key_of_a_recipe():
    text = (DOCUMENT.parents[1] / "reference" / "commands.md").read_text(encoding="utf-8")
    assert [key for key in Recipe.__dataclass_fields__ if f"\n| `{key}` |" not in text] == []

"""The examples of docs/training.md run, in the order in which they stand there."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
from artifact_sets import EXAMPLES
from typer.testing import CliRunner

import opgrad
from opgrad.cli.app import app
from opgrad.cli.commands.artifacts import artifacts
from opgrad.cli.commands.train import Places, Settings
from opgrad.training.run.recipe import Recipe

DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"
BLOCKS = re.compile(r"^```(python|toml|)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "examples").symlink_to(EXAMPLES, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    before = opgrad.get_num_threads()
    opgrad.set_num_threads(1)
    yield tmp_path
    opgrad.set_num_threads(before)


def test_every_example_runs(folder: Path) -> None:
    names: dict[str, object] = {}
    commands = 0
    for kind, text in BLOCKS.findall(DOCUMENT.read_text(encoding="utf-8")):
        if kind == "python":
            exec(text, names)  # each goes on where the one before ended
        for line in text.splitlines() if not kind else []:
            program, *words = shlex.split(line)
            if program == "opgrad" and "my_model" not in words:
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, (line, result.output)
                commands += 1
    assert commands >= 10
    assert (folder / "runs" / "first" / "best.checkpoint").is_file()
    assert (folder / "model.onnx").is_file()


def test_the_recipe_of_the_document_has_every_key(tmp_path: Path) -> None:
    (text,) = (text for kind, text in BLOCKS.findall(DOCUMENT.read_text(encoding="utf-8")) if kind == "toml")
    (tmp_path / "recipe.toml").write_text(text)
    recipe = Recipe.load(tmp_path)
    assert (recipe.validation, recipe.schedule, recipe.patience) == (0.1, "linear", 3)
    for key in Recipe.__dataclass_fields__:
        assert re.search(rf"^\[?{key}\b", text, re.MULTILINE), key


def test_every_option_is_documented() -> None:
    """Those that say how artifacts are made in the document about them."""
    texts = [DOCUMENT.read_text(encoding="utf-8"), DOCUMENT.with_name("artifacts.md").read_text(encoding="utf-8")]
    own = [each.name for group in (Settings, Places) for each in fields(group)]
    for text, names in zip(texts, (own, signature(artifacts).parameters), strict=True):
        for name in names:
            assert name == "model" or re.search(rf"`(-o, )?--{name.replace('_', '-')}[ `]", text), name

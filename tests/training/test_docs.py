"""The guides of training and artifacts run, in the order in which they stand there, and so do the examples."""

import shlex
import sys
import tomllib

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES
from command import succeeds
from snippets import executed, snippets

import opgrad
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.files.dataset import load_named
from opgrad.training.run.recipe import Recipe

GUIDE = "docs/guides/training.md"


def test_the_guide_of_artifacts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").mkdir()
    names, count = executed("docs/guides/artifacts.md")
    assert count == 3
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["made"].trainable == ("w0", "b0", "w1", "b1")
    assert names["optimizer_model"].graph.node[0].op_type == "AdamWOptimizer"


@pytest.mark.usefixtures("threads")
def test_the_guide_of_training(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(EXAMPLES, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    opgrad.set_num_threads(1)
    names, commands = {}, 0
    for kind, _, text in snippets(GUIDE):
        if kind == "python":
            exec(text, names)  # each goes on where the one before ended
        for line in text.splitlines() if not kind else []:
            program, *words = shlex.split(line)
            if program == "opgrad" and "my_model" not in words:
                succeeds(*words)
                commands += 1
    assert commands >= 10
    assert (tmp_path / "runs" / "first" / "best.checkpoint").is_file()
    assert (tmp_path / "model.onnx").is_file()


def test_the_recipe_of_the_document_is_read(tmp_path):
    (text,) = (text for kind, _, text in snippets(GUIDE) if kind == "toml")
    (tmp_path / "recipe.toml").write_text(text)
    recipe = Recipe.load(tmp_path)
    assert (recipe.test_rows, recipe.schedule, recipe.divide) == (297, "linear", {"pixels": 16})


def test_the_reference_has_every_key_of_a_recipe():
    text = (EXAMPLES.parent / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert [key for key in Recipe.__dataclass_fields__ if f"\n| `{key}` |" not in text] == []


LARGEST = 300 * 1024  # bytes of a model in the repository
FOLDERS = {"digits_convolution": (18, 99), "digits_lstm": (7, 13)}  # and the opsets that they may have


@pytest.mark.parametrize("name", FOLDERS)
def test_an_exported_model_learns(name, tmp_path, monkeypatch):
    """The command makes artifacts of it that learn, without PyTorch."""
    model = EXAMPLES / name / "model.onnx"
    least, newest = FOLDERS[name]
    assert least <= next(each.version for each in onnx.load(model).opset_import if not each.domain) <= newest
    assert model.stat().st_size < LARGEST
    readme = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    assert f"opgrad train examples/{name}" in readme
    named = tomllib.loads((EXAMPLES / name / "recipe.toml").read_text(encoding="utf-8"))
    made = {"--loss": named["loss"], "--batch-norm": named.get("batch_norm")}
    command = [word for option, value in made.items() if value for word in (option, value)]
    with monkeypatch.context() as without_torch:
        without_torch.setitem(sys.modules, "torch", None)  # so that to import it fails
        succeeds("artifacts", model, *command, "-o", tmp_path)
    artifacts, recipe = ArtifactSet.load(tmp_path), Recipe.load(EXAMPLES / name)
    data = load_named("digits", artifacts.inputs, recipe.divide).take(np.arange(400))
    trainer = Trainer(artifacts, recipe.learning_rate)
    losses = [list(trainer.epoch(data, recipe.batch_size, np.arange(400))) for _ in range(6)]
    assert np.mean(losses[-1]) < 0.8 * np.mean(losses[0])

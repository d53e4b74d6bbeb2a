"""The examples that start from an exported model: the command makes artifacts that learn, without PyTorch."""

import sys
import tomllib

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES
from command import succeeds

from opgrad.training import ArtifactSet, Trainer
from opgrad.training.files.dataset import load_named
from opgrad.training.run.recipe import Recipe

LARGEST = 300 * 1024  # bytes of a model in the repository
FOLDERS = {"digits_convolution": (18, 99), "digits_lstm": (7, 13)}  # and the opsets that they may have


@pytest.mark.parametrize("name", FOLDERS)
def test_an_exported_model_learns(name, tmp_path, monkeypatch):
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

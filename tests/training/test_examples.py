"""The examples that start from an exported model: their scripts make artifacts that learn, without PyTorch."""

import runpy
import shutil
import sys

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES

from opgrad.training import ArtifactSet, Recipe, Trainer
from opgrad.training.data import load_named

LARGEST = 300 * 1024  # bytes of a model in the repository
FOLDERS = {"digits_convolution": (18, 99), "digits_lstm": (7, 13)}  # and the opsets that they may have


@pytest.mark.parametrize("name", FOLDERS)
def test_an_exported_model_learns(name, tmp_path, monkeypatch, capsys):
    model = EXAMPLES / name / "model.onnx"
    least, newest = FOLDERS[name]
    assert least <= next(each.version for each in onnx.load(model).opset_import if not each.domain) <= newest
    assert model.stat().st_size < LARGEST
    for file in ("model.onnx", "artifacts.py", "recipe.toml"):
        shutil.copy(EXAMPLES / name / file, tmp_path)
    with monkeypatch.context() as without_torch:
        without_torch.setitem(sys.modules, "torch", None)  # so that to import it fails
        runpy.run_path(str(tmp_path / "artifacts.py"))
    assert "trainable" in capsys.readouterr().out
    artifacts, recipe = ArtifactSet.load(tmp_path), Recipe.load(tmp_path)
    data = load_named("digits", artifacts.inputs, recipe.divide).take(np.arange(400))
    trainer = Trainer(artifacts, recipe.learning_rate)
    losses = [list(trainer.epoch(data, recipe.batch_size, np.arange(400))) for _ in range(6)]
    assert np.mean(losses[-1]) < 0.8 * np.mean(losses[0])

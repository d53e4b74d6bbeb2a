"""Models that ship inside packages are trained from end to end. `make test-real` fetches them and runs this."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from halved_models import KINDS
from real_models import MODELS
from real_training import losses_of_halves, refusals, train

FOLDER = Path(os.environ.get("OPGRAD_REAL", ""))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_it_is_trained(model, tmp_path):
    """Inspected, made artifacts of, gradients compared with differences, 20 steps, exported, and the export run."""
    path = FOLDER / model.file
    assert not refusals(path)
    trained = train(model, path, tmp_path)
    assert trained.checked >= min(6, 3 * trained.weights)
    assert trained.off < 0.05
    assert trained.losses[-1] < trained.losses[0]
    assert trained.exported < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["magika/models/standard_v3_3/model.onnx", "silero_vad/data/silero_vad_16k_op15.onnx"])
def test_halves_of_it_train_to_the_same_losses(name, kind, tmp_path):
    """Beside float32 with rounded weights the inputs alone are rounded; beside the model all weights are, too."""
    model = next(each for each in MODELS if each.file == name)
    found = losses_of_halves(model, FOLDER / name, tmp_path, kind)
    eps = float(ml_dtypes.finfo(KINDS[kind]).eps)
    np.testing.assert_allclose(found.halves, found.rounded, rtol=2 * eps)
    np.testing.assert_allclose(found.halves, found.floats, rtol=16 * eps)
    assert found.halves[-1] < found.halves[0]
    assert found.exported == {kind}

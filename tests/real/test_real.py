"""Models that ship inside packages are trained from end to end. `make test-real` fetches them and runs this."""

import os
from pathlib import Path

import pytest
from real_models import MODELS
from real_training import refusals, train

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

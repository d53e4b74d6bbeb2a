"""Two processes that fine-tune together, as one does with the same batches."""

import numpy as np
import pytest
from language_models import make_folder, write_lines
from processes import run_processes

pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from opgrad.training.engine.distributed import Processes  # noqa: E402
from opgrad.tune import Tuner  # noqa: E402

TEXTS = ["the cat sees a red tree .", "hello you", "what is small ?", "i am a bird .", "who are you"]
SETTINGS = {"epochs": 2, "batch_size": 5, "learning_rate": 0.01, "validation": 2, "accumulate": 2}


def tuned(rank, folder):
    """The sums of the values on this process, and the losses of its run."""
    tuner = Tuner(f"{folder}/model", lora="rank=2", pack=True)
    run = tuner.fit(f"{folder}/data.jsonl", f"{folder}/two", processes=Processes(), **SETTINGS)
    sums = {name: float(array.sum(dtype=np.float64)) for name, array in tuner.values.items()}
    return {"sums": sums, "losses": [each.train_loss for each in run.state.history], "files": run.files}


def test_two_processes(tmp_path):
    make_folder(tmp_path / "model", layers=1)
    data = write_lines(tmp_path / "data.jsonl", [{"text": text} for text in TEXTS * 3])
    first, second = run_processes(tuned, 2, tmp_path, str(tmp_path))
    assert first["sums"] == second["sums"]
    assert ("adapter.onnx_adapter" in first["files"], second["files"]) == (True, [])
    alone = Tuner(tmp_path / "model", lora="rank=2", pack=True)
    run = alone.fit(data, tmp_path / "one", **SETTINGS)
    assert first["losses"] == pytest.approx([each.train_loss for each in run.state.history], rel=1e-5)
    for name, array in alone.values.items():
        assert first["sums"][name] == pytest.approx(array.sum(dtype=np.float64), rel=1e-3, abs=1e-4)

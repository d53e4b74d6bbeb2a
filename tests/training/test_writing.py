"""A disk without room: one line with the file's name, the old file as it was, and nothing left behind."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from opgrad.onnxruntime.saving import lower_file
from opgrad.training import ArtifactSet, Checkpoint, write_checkpoint
from opgrad.training.export import write_inference_model
from opgrad.training.metrics import EpochMetrics, write_csv
from opgrad.training.plot import plot_losses

resource = pytest.importorskip("resource", reason="needs limits of file sizes")
DIGITS = Path(__file__).parents[2] / "examples" / "digits"


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Files can have so many bytes: what is written beyond fails as on a full disk, without a name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _checkpoint(path: Path, external_data: bool = False) -> None:
    write_checkpoint(Checkpoint({"w": np.ones(5000, np.float32)}, {}), path, external_data=external_data)


def _model(path: Path) -> None:
    artifacts = ArtifactSet.load(DIGITS)
    write_inference_model(artifacts.eval_model, artifacts.trainable, [artifacts.scores], path, "Module")


def _lowered(path: Path) -> None:
    lower_file(DIGITS / "training_model.onnx", path)


@pytest.mark.parametrize("write", [_checkpoint, _model, _lowered], ids=lambda write: write.__name__)
def test_a_full_disk(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with room_for(1024), pytest.raises(OSError, match=r"File too large: '.*/file'") as caught:
        write(path)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    write(path)
    assert path.stat().st_size > 1024


def test_a_full_disk_when_values_go_outside(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with room_for(4096), pytest.raises(OSError, match=r"File too large: '.*/checkpoint.data'"):
        _checkpoint(path, external_data=True)
    assert not path.exists()


def test_a_full_disk_for_figures_and_pictures(tmp_path: Path) -> None:
    epoch = EpochMetrics(1, 1, 0.1, 1.0, None, None, 1.0, 1.0)
    with room_for(10), pytest.raises(OSError, match=r"File too large: '.*/metrics.csv'"):
        write_csv([epoch], tmp_path / "metrics.csv")
    with room_for(10), pytest.raises(OSError, match=r"File too large: '.*/loss.png'"):
        plot_losses([epoch], [[1.0, 2.0]], 1.0, "losses", tmp_path / "loss.png")
    assert os.listdir(tmp_path) == ["loss.png"]

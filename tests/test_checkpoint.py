"""Reading checkpoints: good, foreign, truncated and damaged ones."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES, SETS, write_checkpoint
from onnx import numpy_helper

from opgrad.training import read_checkpoint


@pytest.mark.parametrize("name", SETS)
def test_checkpoint_holds_the_parameters_of_the_forward_graph(name: str) -> None:
    forward = onnx.load(EXAMPLES / name / "forward.onnx").graph
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in forward.initializer}
    checkpoint = read_checkpoint(EXAMPLES / name / "checkpoint")
    assert not checkpoint.frozen
    assert expected.keys() - checkpoint.trainable.keys() <= {"scale"}
    for key, array in checkpoint.trainable.items():
        np.testing.assert_array_equal(array, expected[key], strict=True)


def test_checkpoint_keeps_frozen_parameters_apart(tmp_path: Path) -> None:
    trainable = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "s": np.float32(7).reshape(())}
    frozen = {"f": np.zeros((0, 3), np.float16)}
    write_checkpoint(tmp_path / "checkpoint", trainable, frozen)
    found = read_checkpoint(tmp_path / "checkpoint")
    for expected, actual in ((trainable, found.trainable), (frozen, found.frozen)):
        assert expected.keys() == actual.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(actual[name], array, strict=True)


def test_checkpoint_that_names_a_parameter_twice_or_has_another_version(tmp_path: Path) -> None:
    one = {"w": np.ones(2, np.float32)}
    write_checkpoint(tmp_path / "twice", one, one)
    with pytest.raises(ValueError, match="names a parameter twice"):
        read_checkpoint(tmp_path / "twice")
    write_checkpoint(tmp_path / "newer", one, {}, version=3)
    with pytest.raises(NotImplementedError, match="version 3, expected 2"):
        read_checkpoint(tmp_path / "newer")


def test_truncated_checkpoints_are_refused(tmp_path: Path) -> None:
    content = (EXAMPLES / "digits_attention" / "checkpoint").read_bytes()
    path = tmp_path / "checkpoint"
    for size in (*range(400), *range(400, len(content), 997), len(content) - 1, len(content) - 4):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"truncated or damaged|no checkpoint"):
            read_checkpoint(path)


def test_foreign_files_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for content in (b"", b"text", b"x" * 1000, (EXAMPLES / "digits" / "eval_model.onnx").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="no checkpoint, expected the identifier ODTC"):
            read_checkpoint(path)


def test_a_damaged_checkpoint_is_refused_or_harmless(tmp_path: Path) -> None:
    """Whatever bit is wrong, nothing but the described errors is raised."""
    path = tmp_path / "checkpoint"
    write_checkpoint(path, {"weight": np.ones((2, 3), np.float32)}, {"bias": np.ones(3, np.float64)})
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << 5 * place % 8
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)
        except (ValueError, NotImplementedError):
            refused += 1
    assert refused > len(content) // 2

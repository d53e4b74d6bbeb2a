"""What the tests of opgrad.training.api start from."""

from pathlib import Path
from typing import Any

import numpy as np
from artifact_sets import EXAMPLES

from opgrad.training.api import CheckpointState, Module, Optimizer

DIGITS = EXAMPLES / "digits"


def load(folder: Path = DIGITS, **arguments: Any) -> tuple[CheckpointState, Module, Optimizer]:
    """State, module and optimizer of an artifact set."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **arguments)
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def batch(rows: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random pixels and labels."""
    random = np.random.default_rng(seed)
    return random.random((rows, 64), np.float32), random.integers(0, 10, rows)


def values(state: CheckpointState) -> dict[str, np.ndarray]:
    """A copy of the parameters by name."""
    return {name: parameter.data.copy() for name, parameter in state.parameters}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Raise unless both have the same arrays, bit for bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)

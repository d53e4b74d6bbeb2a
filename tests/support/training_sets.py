"""What the tests of opgrad.training.api start from."""

import numpy as np
from artifact_sets import EXAMPLES

from opgrad.training import load_named
from opgrad.training.api import CheckpointState, Module, Optimizer
from opgrad.training.run.recipe import Recipe

DIGITS = EXAMPLES / "digits"


def load(folder=DIGITS, checkpoint=None, **arguments):
    """State, module and optimizer of an artifact set, with its own checkpoint or another."""
    state = CheckpointState.load_checkpoint(checkpoint or folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx", **arguments)
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def training_and_test_data(artifacts):
    """The digits for an example's set, parted as its recipe says."""
    recipe = Recipe.load(artifacts.directory)
    return load_named("digits", artifacts.inputs, recipe.divide).split(recipe.test_rows or 0, recipe.split_seed)


def batch(rows=4, seed=0):
    """Random pixels and labels."""
    random = np.random.default_rng(seed)
    return random.random((rows, 64), np.float32), random.integers(0, 10, rows)


def values(state):
    """A copy of the parameters by name."""
    return {name: parameter.data.copy() for name, parameter in state.parameters}


def assert_equal(found, expected):
    """Raise unless both have the same arrays, bit for bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)

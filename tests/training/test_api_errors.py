"""Inputs, files and models that do not fit opgrad.training.api."""

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES
from training_sets import DIGITS, assert_equal, batch, load, values

from opgrad.training import read_checkpoint, write_checkpoint
from opgrad.training.api import CheckpointState, Module, Optimizer
from opgrad.training.files.checkpoint import Checkpoint


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        (lambda x, y: (x,), ValueError, "1 inputs, expected 2: pixels, labels"),
        (lambda x, y: (x, y, y), ValueError, "3 inputs, expected 2"),
        (lambda x, y: (), ValueError, "0 inputs, expected 2"),
        (lambda x, y: (x.astype(np.float64), y), TypeError, "pixels is float64, expected float32"),
        (lambda x, y: (x, y.astype(np.int32)), TypeError, "labels is int32, expected int64"),
        (lambda x, y: (x[:, :63], y), ValueError, r"pixels has shape \(4, 63\), expected \(batch, 64\)"),
        (lambda x, y: (x, y[:3]), ValueError, r"labels has shape \(3,\), expected \(4,\)"),
        (lambda x, y: (x, y + 10), ValueError, r"labels\[0\] is 1., expected 0 to 9"),
    ],
)
@pytest.mark.parametrize("mode", ["first", "reset", "adding", "eval"])
def test_a_batch_that_does_not_fit_changes_nothing(inputs, kind, message, mode):
    state, module, _ = load()
    x, y = batch()
    if mode != "first":
        module(x, y)
    if mode == "reset":
        module.lazy_reset_grad()
    module.train(mode != "eval")
    before, gradients = values(state), {name: gradient.copy() for name, gradient in module.gradients.items()}
    with pytest.raises(kind, match=message):
        module(*inputs(x, y))
    assert_equal(values(state), before)
    assert_equal(dict(module.gradients), gradients)
    module.train()(x, y)
    factor = 2 if mode in ("adding", "eval") else 1
    _, other, _ = load()
    other(x, y)
    assert_equal(dict(module.gradients), {name: factor * gradient for name, gradient in other.gradients.items()})


def test_files_that_are_missing_or_damaged(tmp_path):
    state, module, _ = load()
    damaged = tmp_path / "model.onnx"
    damaged.write_bytes((DIGITS / "training_model.onnx").read_bytes()[:500])
    for act in (
        lambda: Module(tmp_path / "none.onnx", state),
        lambda: Module(DIGITS / "training_model.onnx", state, tmp_path / "none.onnx"),
        lambda: Optimizer(tmp_path / "none.onnx", module),
        lambda: CheckpointState.load_checkpoint(tmp_path / "none"),
    ):
        with pytest.raises(FileNotFoundError, match=r"there is no file .*none"):
            act()
    with pytest.raises(ValueError, match="is no ONNX model, or damaged"):
        Module(damaged, state)
    with pytest.raises(ValueError, match="is no ONNX model, or damaged"):
        Optimizer(DIGITS / "checkpoint", module)
    with pytest.raises(ValueError, match="is no checkpoint"):
        CheckpointState.load_checkpoint(damaged)


def test_an_operator_that_nobody_has(tmp_path):
    model = onnx.load(DIGITS / "training_model.onnx")
    next(node for node in model.graph.node if node.op_type == "ReluGrad").op_type = "NobodysGrad"
    with pytest.raises(NotImplementedError, match=r"com\.microsoft:NobodysGrad, which neither onnxruntime nor opgrad"):
        Module(model.SerializeToString(), load()[0])


def test_parts_of_different_models(tmp_path):
    other = EXAMPLES / "digits_attention"
    state = CheckpointState.load_checkpoint(other / "checkpoint")
    with pytest.raises(ValueError, match=r"has the trainable parameters W1, Wk.*expected.*W1, W2, W3, b1"):
        Module(DIGITS / "training_model.onnx", state)
    with pytest.raises(ValueError, match=r"no input lazy_reset_grad, expected a training graph"):
        Module(DIGITS / "eval_model.onnx", load()[0])
    with pytest.raises(NotImplementedError, match=r"has the nodes Gemm.*expected one AdamWOptimizer"):
        Optimizer(DIGITS / "eval_model.onnx", load()[1])
    _, module, optimizer = load(other)
    module(np.zeros((2, 64), np.int64), np.zeros(2, np.int64))
    optimizer.step()
    moments = module._state._memory.checkpoint({}, True).optimizers
    full = read_checkpoint(DIGITS / "checkpoint")
    write_checkpoint(Checkpoint(full.trainable, full.frozen, moments), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(DIGITS / "training_model.onnx", state)
    with pytest.raises(ValueError, match="saved with another optimizer or model"):
        Optimizer(DIGITS / "optimizer_model.onnx", module)


def test_other_devices_and_types():
    state, _, _ = load()
    for device in ("cuda", "cuda:0", "cpu:x", "somewhere"):
        with pytest.raises(NotImplementedError, match=f"device is '{device}', expected 'cpu'"):
            Module(DIGITS / "training_model.onnx", state, device=device)
    with pytest.raises(TypeError, match="state is int, expected Checkpoint"):
        CheckpointState(3)
    with pytest.raises(TypeError, match="state is str, expected CheckpointState"):
        Module(DIGITS / "training_model.onnx", "checkpoint")
    with pytest.raises(TypeError, match="module is CheckpointState, expected Module"):
        Optimizer(DIGITS / "optimizer_model.onnx", state)
    double = Checkpoint({"w": np.zeros(2)}, {})
    with pytest.raises(NotImplementedError, match="'w' is float64, expected float32"):
        CheckpointState(double)

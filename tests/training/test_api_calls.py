"""Calls of a module, the parameters' memory, export."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES, write_linear_set
from onnx import helper
from onnxruntime import OrtValue
from training_sets import DIGITS, batch, load

from opgrad.training import read_checkpoint, write_checkpoint
from opgrad.training.api import CheckpointState, Module, Optimizer
from opgrad.training.files.checkpoint import Checkpoint

# --- parameters ------------------------------------------------------------------------------------------------------


def test_parameters_are_live_memory():
    state, module, _ = load()
    x, y = batch()
    first = module(x, y)
    view, old = state.parameters["W1"].data, state.parameters["W1"].data.copy()
    state.parameters["W1"] = np.zeros_like(old)
    assert not view.any()
    changed = module(x, y)
    assert changed != first
    view[...] = np.asfortranarray(old)
    assert module(x, y) == first
    state.parameters["W1"].data = OrtValue.ortvalue_from_numpy(np.zeros_like(old))
    assert module.eval()(x, y) == changed


def test_buffers_of_parameters(tmp_path):
    write_linear_set(tmp_path)
    state, module, _ = load(tmp_path)
    assert (module.get_parameters_size(), module.get_parameters_size(False)) == (2, 3)
    state.parameters["w"] = np.array([[3], [4]], np.float32)
    assert not state.parameters["b"].requires_grad
    assert state.parameters["b"].grad is None
    every = module.get_contiguous_parameters().numpy()
    np.testing.assert_array_equal(every, np.float32([3, 4, 0.5]))
    np.testing.assert_array_equal(module.get_contiguous_parameters(trainable_only=True).numpy(), [3, 4])
    module.copy_buffer_to_parameters(OrtValue.ortvalue_from_numpy(np.float32([5, 6])))
    module.copy_buffer_to_parameters(np.float32([7, 8, 9]), trainable_only=False)
    np.testing.assert_array_equal(state.parameters["w"].data, [[7], [8]])
    np.testing.assert_array_equal(state.parameters["b"].data, [9])
    for buffer, kind, message in (
        (np.zeros(3, np.float32), ValueError, r"buffer has shape \(3,\), expected \(2,\)"),
        (np.zeros(2), TypeError, "buffer is float64, expected float32"),
        ([1, 2], TypeError, "buffer is list, expected float32"),
    ):
        with pytest.raises(kind, match=message):
            module.copy_buffer_to_parameters(buffer)
    np.testing.assert_array_equal(state.parameters["w"].data, [[7], [8]])


def test_a_nominal_checkpoint_is_filled_from_a_buffer(tmp_path):
    write_linear_set(tmp_path)
    _, complete, _ = load(tmp_path)
    full = read_checkpoint(tmp_path / "checkpoint")
    write_checkpoint(Checkpoint(full.trainable, full.frozen, nominal=True), tmp_path / "checkpoint")
    state, module, optimizer = load(tmp_path)
    x, y = np.ones((3, 2), np.float32), np.ones((3, 1), np.float32)
    assert len(state.parameters) == 2
    assert module.get_parameters_size(False) == 3
    for act in (lambda: state.parameters["w"], lambda: module(x, y)):
        with pytest.raises(RuntimeError, match="nominal"):
            act()
    with pytest.raises(ValueError, match="trainable_only is True, expected False"):
        module.copy_buffer_to_parameters(complete.get_contiguous_parameters(True))
    module.copy_buffer_to_parameters(complete.get_contiguous_parameters(), trainable_only=False)
    assert module(x, y) == complete(x, y)
    optimizer.step()
    assert state.parameters["w"].data.any()


# --- inputs and outputs ----------------------------------------------------------------------------------------------


def test_inputs_of_any_layout():
    _, module, _ = load()
    x, y = batch(6)
    expected = module(x, y)
    assert isinstance(expected, np.ndarray)
    assert expected.shape == ()
    wide = np.zeros((6, 128), np.float32)
    wide[:, ::2] = x
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(6, 64)
    for same in (np.asfortranarray(x), wide[:, ::2], x[::-1][::-1], unaligned):
        assert module(same, y) == expected
    assert module(x.tolist(), y) == module(x, y.tolist()) == expected
    reverse = np.ascontiguousarray(x[::-1]), y[::-1].copy()
    assert module(x[::-1], y[::-1]) == module(*reverse)


def test_batches_of_changing_sizes():
    _, module, _ = load()
    sizes = [3, 2000, 5, 2000, 3, 1024, 0, 3]
    losses = {rows: Module(DIGITS / "training_model.onnx", load()[0])(*batch(rows)) for rows in set(sizes)}
    for rows in sizes:
        assert module(*batch(rows)) == losses[rows]


def test_ort_values_in_and_out():
    _, module, _ = load()
    x, y = batch()
    expected = module(x, y)
    ort_x, ort_y = (OrtValue.ortvalue_from_numpy(each) for each in (x, y))
    found = module(ort_x, ort_y)
    assert isinstance(found, OrtValue)
    assert found.numpy() == expected
    assert module(x, ort_y) == module(ort_x, y) == expected
    assert module.eval()(ort_x, ort_y).numpy() == expected
    with pytest.raises(TypeError, match="pixels is int64, expected float32"):
        module(ort_y, ort_x)
    with pytest.raises(TypeError, match="pixels is set, expected a NumPy array or an OrtValue"):
        module({1}, y)


@pytest.mark.parametrize("ranked", [True, False])
def test_graphs_with_several_outputs(ranked, tmp_path):
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(DIGITS / name)
        shape = ["batch", 10] if ranked else None
        model.graph.output.insert(1, helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, shape))
        onnx.save(model, tmp_path / name)
    state = CheckpointState.load_checkpoint(DIGITS / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    assert module.output_names()[1:] == ["logits"]
    x, y = batch()
    loss, logits = module(x, y)
    kept = logits.copy()
    shifted = logits - logits.max(axis=1, keepdims=True)
    expected = np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(4), y])
    assert loss == pytest.approx(expected, rel=1e-5)
    assert module(*batch(7, 1))[1].shape == (7, 10)
    found = module.eval()(OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(y))
    np.testing.assert_allclose(found[1].numpy(), kept, rtol=1e-6)
    np.testing.assert_array_equal(logits, kept)


def test_models_as_bytes_and_session_options():
    state = CheckpointState.load_checkpoint(DIGITS / "checkpoint")
    training, evaluation, optimizer = (
        (DIGITS / f"{name}.onnx").read_bytes() for name in ("training_model", "eval_model", "optimizer_model")
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    module = Module(training, state, evaluation, device="cpu:0", session_options=options)
    assert module(*batch()) == load()[1](*batch())
    assert Optimizer(optimizer, module).get_learning_rate() == np.float32(1e-3)


def test_the_label_minus_one_is_ignored():
    state, module, _ = load()
    x, y = batch(4)
    y[1] = -1
    kept = [0, 2, 3]
    assert module(x, y) == pytest.approx(float(module(x[kept], y[kept])), rel=1e-6)
    assert module.eval()(x, y) == pytest.approx(float(module(x[kept], y[kept])), rel=1e-6)
    for name in ("training_model.onnx", "eval_model.onnx"):
        model = onnx.load(DIGITS / name)
        for node in model.graph.node:
            if node.op_type.startswith("SoftmaxCrossEntropyLoss"):
                node.attribute.append(helper.make_attribute("ignore_index", 7))
        module = Module(model.SerializeToString(), state) if "training" in name else module
    y[1] = 7
    kept = [row for row in range(4) if y[row] != 7]
    assert module(x, y) == pytest.approx(float(module(x[kept], y[kept])), rel=1e-6)


# --- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [["logits"], ["a1", "logits"], ["onnx::loss::2"]])
def test_export_runs_without_opgrad(outputs, tmp_path):
    state, module, optimizer = load()
    x, y = batch()
    loss = module(x, y)
    optimizer.step()
    path = tmp_path / "model.onnx"
    module.export_model_for_inferencing(path, outputs)
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [item.name for item in session.get_outputs()] == outputs
    feeds = {item.name: {"pixels": x, "labels": y}[item.name] for item in session.get_inputs()}
    found = session.run(None, feeds)
    if outputs == ["onnx::loss::2"]:
        assert found[0] == pytest.approx(float(module.eval()(x, y)), rel=1e-5)
        assert found[0] < loss
    else:
        w1, b1 = state.parameters["W1"].data, state.parameters["b1"].data
        assert list(feeds) == ["pixels"]
        if outputs[0] == "a1":
            np.testing.assert_allclose(found[0], np.maximum(x @ w1.T + b1, 0), rtol=1e-5, atol=1e-6)


def test_the_examples_of_the_migration_guide_run(tmp_path, monkeypatch):
    text = (EXAMPLES.parent / "docs" / "guides" / "migration.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("artifacts").symlink_to(DIGITS, target_is_directory=True)
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)  # each goes on where the one before ended
    assert Path("model.onnx").is_file()

"""opgrad.training.api: what old training code relies on, calls, export, and what does not fit."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES, optimizer_model, write_linear_set
from onnx import helper
from onnxruntime import OrtValue
from snippets import executed
from training_sets import DIGITS, assert_equal, batch, load, values

from opgrad.training import read_checkpoint, write_checkpoint
from opgrad.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from opgrad.training.files.checkpoint import Checkpoint

# --- training --------------------------------------------------------------------------------------------------------


def test_gradients_add_up_until_they_are_reset():
    state, module, _ = load()
    batches = [batch(4, seed) for seed in range(3)]
    single = []
    for each in batches:
        module.lazy_reset_grad()
        module(*each)
        single.append({name: gradient.copy() for name, gradient in module.gradients.items()})
    before = module.gradients["W1"].copy()
    module.lazy_reset_grad()
    np.testing.assert_array_equal(module.gradients["W1"], before)
    for each in batches:
        module(*each)
    for name, parameter in state.parameters:
        expected = single[0][name] + single[1][name] + single[2][name]
        np.testing.assert_array_equal(parameter.grad, expected)
    module.eval()(*batches[0])
    np.testing.assert_array_equal(state.parameters["b3"].grad, single[0]["b3"] + single[1]["b3"] + single[2]["b3"])


def test_a_step_takes_accumulated_gradients():
    (one, module, optimizer), (other, twice, second) = load(), load()
    x, y = batch(8)
    for part in (slice(0, 4), slice(4, 8)):
        module(x[part], y[part])
    gradients = {name: gradient.copy() for name, gradient in module.gradients.items()}
    twice(x, y)
    for name, gradient in twice.gradients.items():
        np.testing.assert_allclose(gradients[name], 2 * gradient, atol=1e-6)
        gradient[...] = gradients[name]
    optimizer.step()
    second.step()
    assert_equal(values(one), values(other))


def test_a_graph_whose_accumulators_have_a_second_output(tmp_path):
    """Nothing may read it, or the sum of gradients."""
    model = onnx.load(DIGITS / "training_model.onnx")
    for node in model.graph.node:
        if node.op_type == "InPlaceAccumulatorV2":
            node.output.append(node.output[0] + ".sum")
    onnx.save(model, tmp_path / "training_model.onnx")
    _, module, _ = load()
    other = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(DIGITS / "checkpoint"))
    for seed in (0, 1, 2):
        if seed == 2:
            module.lazy_reset_grad()
            other.lazy_reset_grad()
        assert module(*batch(4, seed)) == other(*batch(4, seed))
        assert_equal(dict(other.gradients), dict(module.gradients))
    model.graph.output.add().name = model.graph.node[-1].output[-1]
    with pytest.raises(ValueError, match="does not accumulate gradients as graphs of the artifact generator do"):
        Module(model.SerializeToString(), CheckpointState.load_checkpoint(DIGITS / "checkpoint"))


# --- saving and going on ---------------------------------------------------------------------------------------------


def test_training_goes_on_where_it_stopped(tmp_path):
    state, module, optimizer = load()
    optimizer.set_learning_rate(0.02)
    for seed in range(10):
        if seed == 6:
            state.properties["epoch"] = 3
            CheckpointState.save_checkpoint(state, tmp_path / "checkpoint", include_optimizer_state=True)
            CheckpointState.save_checkpoint(state, str(tmp_path / "parameters"))
        module.lazy_reset_grad()
        module(*batch(5, seed))
        optimizer.step()
    resumed = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.properties["epoch"] == 3
    module = Module(DIGITS / "training_model.onnx", resumed)
    optimizer = Optimizer(DIGITS / "optimizer_model.onnx", module)
    assert optimizer.get_learning_rate() == np.float32(0.02)
    for seed in range(6, 10):
        module(*batch(5, seed))
        optimizer.step()
        module.lazy_reset_grad()
    assert_equal(values(resumed), values(state))
    assert not read_checkpoint(tmp_path / "parameters").optimizers


def test_optimizer_state_without_an_optimizer_is_kept(tmp_path):
    state, module, optimizer = load()
    module(*batch())
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "first", True)
    CheckpointState.save_checkpoint(CheckpointState.load_checkpoint(tmp_path / "first"), tmp_path / "second", True)
    first, second = (read_checkpoint(tmp_path / name).optimizers["group0"] for name in ("first", "second"))
    assert first.step == second.step == 1
    np.testing.assert_array_equal(first.moments["W1"]["momentum1"], second.moments["W1"]["momentum1"])


def test_properties():
    properties = CheckpointState.load_checkpoint(DIGITS / "checkpoint").properties
    given = {"i": 3, "f": 0.1, "s": "text", "b": True, "n": np.int64(4), "x": np.float32(0.5), "big": 2**70}
    for name, value in given.items():
        properties[name] = value
    assert len(properties) == 7
    assert dict(properties) == dict(properties.items()) == {
        "i": 3, "f": float(np.float32(0.1)), "s": "text", "b": 1, "n": 4, "x": 0.5, "big": float(2**70),
    }  # fmt: skip
    assert type(properties["n"]) is type(properties["b"]) is int
    assert "i" in properties
    assert "j" not in properties
    with pytest.raises(KeyError, match="Property j not found"):
        properties["j"]
    with pytest.raises(TypeError, match="'i' is list, expected int, float or str"):
        properties["i"] = [1]
    with pytest.raises(ValueError, match="which float32 cannot hold"):
        properties["i"] = 1e39
    assert properties["i"] == 3


# --- optimizers ------------------------------------------------------------------------------------------------------


def test_an_optimizer_model_that_clips():
    model = optimizer_model("InplaceClipGradNorm", "SGDOptimizerV2")
    model.graph.node[0].attribute.append(helper.make_attribute("max_norm", 0.05))
    state, module, _ = load()
    optimizer = Optimizer(model.SerializeToString(), module)
    optimizer.set_learning_rate(0.5)
    module(*batch())
    before = values(state)
    gradients = {name: gradient.astype(np.float64) for name, gradient in module.gradients.items()}
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
    optimizer.step()
    for name, gradient in gradients.items():
        clipped = gradient * 0.05 / (norm + 1e-6)
        np.testing.assert_allclose(module.gradients[name], clipped, rtol=1e-6)
        np.testing.assert_allclose(values(state)[name], before[name] - 0.5 * clipped, rtol=1e-6, atol=1e-9)
    module.lazy_reset_grad()
    module(*batch())
    assert module.clip_grad_norm(1e-3) == pytest.approx(module.clip_grad_norm(1e9) * 1e3 * norm, rel=0.2)
    assert module.clip_grad_norm(1.0) == pytest.approx(1e-3, rel=1e-2)


def test_learning_rates():
    _, module, optimizer = load()
    optimizer.set_learning_rate(np.float64(0.1))
    assert optimizer.get_learning_rate() == float(np.float32(0.1))
    assert Optimizer(DIGITS / "optimizer_model.onnx", module).get_learning_rate() == float(np.float32(0.1))
    with pytest.raises(TypeError, match="learning_rate is str"):
        optimizer.set_learning_rate("0.1")


def test_a_schedule_rises_and_falls():
    _, module, optimizer = load()
    schedule = LinearLRScheduler(optimizer, 2, 6, 0.5)
    found = [optimizer.get_learning_rate()]
    for _ in range(8):
        module(*batch())
        optimizer.step()
        schedule.step()
        module.lazy_reset_grad()
        found.append(optimizer.get_learning_rate())
    np.testing.assert_allclose(found, [0, 0.25, 0.5, 0.375, 0.25, 0.125, 0, 0, 0], atol=1e-7)


def test_a_step_before_any_gradient():
    state, module, optimizer = load()
    before = values(state)
    with pytest.raises(RuntimeError, match="no gradients yet"):
        optimizer.step()
    assert_equal(values(state), before)
    module.gradients["b3"][...] = 1
    optimizer.step()
    assert (state.parameters["b3"].data != before["b3"]).all()


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
    with pytest.raises(TypeError, match="pixels is int64, expected an array of float32"):
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
    monkeypatch.chdir(tmp_path)
    Path("artifacts").symlink_to(DIGITS, target_is_directory=True)
    assert executed("docs/guides/migration.md")[1] == 3
    assert Path("model.onnx").is_file()


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        (lambda x, y: (x,), ValueError, "1 inputs, expected 2: pixels, labels"),
        (lambda x, y: (x, y, y), ValueError, "3 inputs, expected 2"),
        (lambda x, y: (), ValueError, "0 inputs, expected 2"),
        (lambda x, y: (x.astype(np.float64), y), TypeError, "pixels is float64, expected an array of float32"),
        (lambda x, y: (x, y.astype(np.int32)), TypeError, "labels is int32, expected an array of int64"),
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


TRAINING, OTHER = DIGITS / "training_model.onnx", EXAMPLES / "digits_attention"
MISSING, LACKING = DIGITS / "none.onnx", "there is no file .*none"
DAMAGED = TRAINING.read_bytes()[:500]


def with_nobodys_operator():
    model = onnx.load(TRAINING)
    next(node for node in model.graph.node if node.op_type == "ReluGrad").op_type = "NobodysGrad"
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda state, _: Module(MISSING, state), FileNotFoundError, LACKING),
        (lambda state, _: Module(TRAINING, state, MISSING), FileNotFoundError, LACKING),
        (lambda _, module: Optimizer(MISSING, module), FileNotFoundError, LACKING),
        (lambda *_: CheckpointState.load_checkpoint(MISSING), FileNotFoundError, LACKING),
        (lambda state, _: Module(DAMAGED, state), ValueError, "is no ONNX model, or damaged"),
        (lambda _, module: Optimizer(DIGITS / "checkpoint", module), ValueError, "is no ONNX model, or damaged"),
        (lambda *_: CheckpointState.load_checkpoint(TRAINING), ValueError, "is no checkpoint"),
        (lambda state, _: Module(with_nobodys_operator(), state), NotImplementedError,
         r"com\.microsoft:NobodysGrad, which neither onnxruntime nor opgrad"),
        (lambda *_: Module(TRAINING, CheckpointState.load_checkpoint(OTHER / "checkpoint")), ValueError,
         "has the trainable parameters W1, Wk.*expected.*W1, W2, W3, b1"),
        (lambda state, _: Module(DIGITS / "eval_model.onnx", state), ValueError,
         "no input lazy_reset_grad, expected a training graph"),
        (lambda _, module: Optimizer(DIGITS / "eval_model.onnx", module), NotImplementedError,
         "has the nodes Gemm.*expected one AdamWOptimizer"),
        *((lambda state, _, device=each: Module(TRAINING, state, device=device), NotImplementedError,
           f"device is '{each}', expected 'cpu'") for each in ("cuda:x", "cpu:x", "somewhere")),
        (lambda *_: CheckpointState(3), TypeError, "state is int, expected Checkpoint"),
        (lambda *_: Module(TRAINING, "checkpoint"), TypeError, "state is str, expected CheckpointState"),
        (lambda state, _: Optimizer(TRAINING, state), TypeError, "module is CheckpointState, expected Module"),
        (lambda *_: CheckpointState(Checkpoint({"w": np.zeros(2)}, {})), NotImplementedError,
         "'w' is float64, expected float32"),
    ],
)  # fmt: skip
def test_what_cannot_be_opened(act, error, message):
    state, module, _ = load()
    with pytest.raises(error, match=message):
        act(state, module)


def test_moments_of_another_model(tmp_path):
    _, module, optimizer = load(OTHER)
    module(np.zeros((2, 64), np.int64), np.zeros(2, np.int64))
    optimizer.step()
    moments = module._state._memory.checkpoint({}, True).optimizers
    full = read_checkpoint(DIGITS / "checkpoint")
    write_checkpoint(Checkpoint(full.trainable, full.frozen, moments), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(TRAINING, state)
    with pytest.raises(ValueError, match="saved with another optimizer or model"):
        Optimizer(DIGITS / "optimizer_model.onnx", module)

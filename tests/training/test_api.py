"""The names of onnxruntime.training.api: what old training code relies on."""

import json

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES, SETS, optimizer_model
from onnx import helper
from training_sets import DIGITS, assert_equal, batch, load, values

from opgrad.training import load_named, read_checkpoint
from opgrad.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from opgrad.training.files.artifact_set import tensor_spec
from opgrad.training.run.recipe import Recipe

# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_the_old_loop_gives_the_losses_of_the_old_runtime(name):
    folder = EXAMPLES / name
    reference, recipe = json.loads((folder / "reference.json").read_text()), Recipe.load(folder)
    graph = onnx.load(folder / "eval_model.onnx").graph
    specs = [tensor_spec(value) for value in graph.input[:2]]
    rows = load_named("digits", tuple(specs), recipe.divide)
    training, test = rows.split(recipe.test_rows or 0, recipe.split_seed)
    _, module, optimizer = load(folder)
    optimizer.set_learning_rate(recipe.learning_rate)
    losses = []
    for epoch in range(recipe.epochs):
        order = np.random.default_rng(recipe.seed + epoch).permutation(training.rows)
        module.train()
        epoch_losses = []
        for start in range(0, len(order), recipe.batch_size):
            rows_taken = training.take(order[start : start + recipe.batch_size])
            epoch_losses.append(module(*[rows_taken.arrays[each] for each in module.input_names()]))
            optimizer.step()
            module.lazy_reset_grad()
        losses.append(np.mean(epoch_losses))
    np.testing.assert_allclose(losses, reference["train_loss_per_epoch"], rtol=1e-3)
    module.eval()
    loss = module(*[test.arrays[each] for each in module.input_names()])
    assert loss == pytest.approx(reference["eval_loss"], rel=1e-3)


def test_gradients_add_up_until_they_are_reset():
    state, module, _ = load()
    batches = [batch(4, seed) for seed in range(3)]
    single = []
    for each in batches:
        module.lazy_reset_grad()
        module(*each)
        single.append({name: gradient.copy() for name, gradient in module.gradients.items()})
    module.lazy_reset_grad()
    before = module.gradients["W1"].copy()
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


def test_gradients_stay_after_a_batch_that_is_refused():
    _, module, _ = load()
    module(*batch(4, 0))
    before = {name: array.copy() for name, array in module.gradients.items()}
    images, labels = batch(4, 1)
    with pytest.raises(ValueError, match="label"):
        module(images, labels + 1000)
    assert_equal(dict(module.gradients), before)


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


def clipping_model(kind, max_norm):
    model = optimizer_model("InplaceClipGradNorm", kind)
    model.graph.node[0].attribute.append(helper.make_attribute("max_norm", max_norm))
    return model.SerializeToString()


def test_an_optimizer_model_that_clips():
    state, module, _ = load()
    optimizer = Optimizer(clipping_model("SGDOptimizerV2", 0.05), module)
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

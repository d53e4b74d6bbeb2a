"""Artifact sets beside those that onnxruntime-training 1.19.2 made: generated, trained, looked at, exported."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES
from command import succeeds
from lowered_sets import NAMES, batches
from model_sets import SETS
from training_sets import load

from opgrad.gradients import gradients
from opgrad.onnx.graph import graph as graphs
from opgrad.onnxruntime import lower
from opgrad.training import ArtifactSet, Trainer, read_checkpoint
from opgrad.training.api import CheckpointState
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

ARTIFACTS = Path(__file__).parents[1] / "artifacts"


def check_losses(folder, reference, steps, evaluations, rtol):
    """Those of the steps and of the evaluations, and frozen values behind them; returns state and module."""
    state, module, optimizer = load(folder)
    optimizer.set_learning_rate(reference["learning_rate"])
    losses = []
    for batch in steps:
        losses.append(first(module(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, reference["loss_per_step"], rtol=rtol)
    module.eval()
    evaluated = [first(module(*batch)) for batch in evaluations]
    np.testing.assert_allclose(evaluated, reference["eval_loss_per_batch"], rtol=rtol)
    for frozen, values in reference["frozen_after"].items():
        np.testing.assert_allclose(state.parameters[frozen].data, values, rtol=1e-3, atol=1e-4)
    return state, module, evaluated


def first(results):
    return float(results[0] if isinstance(results, tuple) else results)


ORIGINAL = 2e-4  # of losses after a few steps in float32, whose order of additions differs


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_original(name):
    reference = json.loads((ARTIFACTS / name / "reference.json").read_text())
    steps, evaluations = ([each.values() for each in several] for several in batches(name, reference))
    check_losses(ARTIFACTS / name, reference, steps, evaluations, ORIGINAL)


FILES = ("training_model.onnx", "eval_model.onnx", "checkpoint", "optimizer_model.onnx")


@pytest.mark.parametrize("name", ["digits", "digits_attention"])
def test_the_contract_of_the_old_package(name, tmp_path):
    old = EXAMPLES / name
    made = generate_artifacts(old / "forward.onnx", None, None, LossType.CrossEntropyLoss, OptimType.AdamW, tmp_path)
    assert made.files == FILES
    assert {file.name for file in tmp_path.iterdir()} == {*FILES}
    mine, theirs = (onnx.load(folder / "training_model.onnx").graph for folder in (tmp_path, old))
    assert list(mine.input) == list(theirs.input)
    assert [each.name for each in mine.output[1:]] == [each.name for each in theirs.output[1:]]
    assert [each.type for each in mine.output] == [each.type for each in theirs.output]
    accumulators = [node for node in mine.node if node.op_type == "InPlaceAccumulatorV2"]
    assert accumulators == [node for node in theirs.node if node.op_type == "InPlaceAccumulatorV2"]
    seed = {each.name: onnx.numpy_helper.to_array(each) for each in mine.initializer}[f"{mine.output[0].name}_grad"]
    assert (seed, seed.shape, seed.dtype) == (1, (), np.float32)
    assert made.loss == "onnx::loss::2"
    assert made.trainable == tuple(read_checkpoint(old / "checkpoint").trainable)


@pytest.mark.parametrize("model", ["digits/forward", "digits_attention/forward", "digits_lstm/model"])
def test_types_are_inferred_a_few_times(model, tmp_path, monkeypatch):
    """Those of all values; afterwards those of new nodes alone."""
    file, counted, original = EXAMPLES / f"{model}.onnx", [], graphs.infer

    def infer(*arguments):
        counted.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(graphs, "infer", infer)
    generate_artifacts(file, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    assert len(counted) <= 4
    counted.clear()
    loaded = onnx.load(file)
    gradients(loaded, loaded.graph.output[0].name, loaded.graph.initializer[0].name)
    assert len(counted) <= 2


@pytest.mark.parametrize("name", ["digits", "digits_attention"])
def test_losses_are_those_of_the_old_artifacts(name, tmp_path):
    old = EXAMPLES / name
    generate_artifacts(old / "forward.onnx", None, None, LossType.CrossEntropyLoss, OptimType.AdamW, tmp_path)
    sets = [ArtifactSet.load(folder) for folder in (tmp_path, old)]
    random, data = np.random.default_rng(0), sets[0].inputs[0]
    values = random.random((20, 64), np.float32) if data.dtype == np.float32 else random.integers(0, 17, (20, 64))
    batch = {data.name: values.astype(data.dtype), sets[0].label.name: random.integers(0, 10, 20)}
    mine, theirs = ([trainer.step(batch) for _ in range(4)] for trainer in map(Trainer, sets))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert mine[-1] < mine[0]


@pytest.fixture(params=[each for each in SETS if each.name in ("lstm", "gru")], ids=lambda each: each.name)
def original(request):
    return request.param


def test_artifacts_of_the_same_model_have_the_same_operators_and_losses(original, tmp_path):
    """The model, from the eval model of the set: without the loss, its parameters as constants."""
    folder = original.folder
    model = onnx.load(folder / "eval_model.onnx")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    parameters = {name: each.data for name, each in state.parameters}
    del model.graph.node[-1]
    scores = onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["n", 3])
    for values, kept in ((model.graph.input, model.graph.input[:1]), (model.graph.output, [scores])):
        copies = [onnx.ValueInfoProto.FromString(each.SerializeToString()) for each in kept]
        del values[:]
        values.extend(copies)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(each, name) for name, each in parameters.items())
    generate_artifacts(model, list(parameters), None, LossType.CrossEntropyLoss, OptimType.AdamW, tmp_path)
    operators = ([node.op_type for node in onnx.load(each / "training_model.onnx").graph.node]
                 for each in (folder, tmp_path))  # fmt: skip
    mine, theirs = (sorted(name for name in names if name.startswith(("LSTM", "GRU"))) for names in operators)
    assert mine == theirs
    steps, evaluations = ([each.values() for each in several] for several in original.batches())
    check_losses(tmp_path, original.reference, steps, evaluations, 1e-5)


@pytest.fixture(params=SETS, ids=lambda each: each.name)
def model(request):
    return request.param


def stock(path, batch):
    """The outputs of a model in an onnxruntime that knows nothing of opgrad."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {each.name: batch[each.name] for each in session.get_inputs()})


def test_losses_are_those_of_the_reference(model, tmp_path):
    steps, evaluations = ([each.values() for each in several] for several in model.batches())
    state, module, evaluated = check_losses(model.folder, model.reference, steps, evaluations, ORIGINAL)
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    again = load(model.folder, tmp_path / "saved")[1].eval()
    assert [first(again(*batch)) for batch in evaluations] == evaluated
    module.export_model_for_inferencing(tmp_path / "model.onnx", model.outputs)
    assert all(np.isfinite(each).all() for each in stock(tmp_path / "model.onnx", model.batches()[1][0]))


def test_the_command_trains_and_exports(model, tmp_path):
    np.savez(tmp_path / "data.npz", **model.rows())
    out, rows = tmp_path / "out", model.reference["rows"]
    options = ("--epochs", 2, "--batch-size", rows, "--validation", 2 * rows, "--export", tmp_path / "exported.onnx")
    succeeds("train", model.folder, "--data", tmp_path / "data.npz", "--output", out, *options)
    figures = json.loads((out / "metrics.json").read_text())
    assert np.isfinite([figures["test_loss"], *figures["train_loss_per_epoch"]]).all()
    assert (figures["test_accuracy"] is not None) == model.classes
    assert figures["exported_accuracy"] == figures["test_accuracy"]
    batch = model.batches()[1][0]
    for path in (out / "model.onnx", tmp_path / "exported.onnx"):
        exported = onnx.load(path)
        onnx.checker.check_model(exported, full_check=True)
        assert tuple(each.name for each in exported.graph.output) == model.outputs
        assert all(np.isfinite(each).all() for each in stock(path, batch))


def test_it_runs_lowered(model, tmp_path):
    """The training model gives the first loss in stock onnxruntime, and the eval model loads there."""
    if not model.lowered:
        pytest.xfail("an operator has no form in plain ONNX")
    succeeds("lower", model.folder / "training_model.onnx", "-o", tmp_path / "plain.onnx")
    state, batch = CheckpointState.load_checkpoint(model.folder / "checkpoint"), model.batches()[0][0]
    feeds = batch | {name: each.data for name, each in state.parameters} | {"lazy_reset_grad": np.ones(1, np.bool_)}
    feeds |= {f"{name}_grad.accumulation.buffer": np.zeros_like(each.data) for name, each in state.parameters}
    loss = stock(tmp_path / "plain.onnx", feeds)[0]
    np.testing.assert_allclose(loss, model.reference["loss_per_step"][0], rtol=1e-5)
    onnx.save(lower(onnx.load(model.folder / "eval_model.onnx")), tmp_path / "eval.onnx")
    assert np.isfinite(stock(tmp_path / "eval.onnx", feeds)[0])

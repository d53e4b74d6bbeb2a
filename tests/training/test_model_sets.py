"""Small models of many kinds as onnxruntime-training 1.19.2 made artifacts of them: trained, looked at, exported."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from command import cli
from model_sets import SETS

from opgrad.onnxruntime import lower
from opgrad.training.api import CheckpointState, Module, Optimizer

RTOL = 2e-4  # of losses after a few steps in float32, whose order of additions differs


@pytest.fixture(params=SETS, ids=lambda each: each.name)
def model(request):
    return request.param


def opened(folder, checkpoint):
    state = CheckpointState.load_checkpoint(checkpoint)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def stock(path, batch):
    """The outputs of a model in an onnxruntime that knows nothing of opgrad."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {each.name: batch[each.name] for each in session.get_inputs()})


def test_losses_are_those_of_the_reference(model, tmp_path):
    reference, (steps, evaluations) = model.reference, model.batches()
    state, module, optimizer = opened(model.folder, model.folder / "checkpoint")
    optimizer.set_learning_rate(reference["learning_rate"])
    losses = []
    for batch in steps:
        losses.append(first(module(*batch.values())))
        optimizer.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, reference["loss_per_step"], rtol=RTOL)
    module.eval()
    evaluated = [first(module(*batch.values())) for batch in evaluations]
    np.testing.assert_allclose(evaluated, reference["eval_loss_per_batch"], rtol=RTOL)
    for frozen, values in reference["frozen_after"].items():
        np.testing.assert_allclose(state.parameters[frozen].data, values, rtol=1e-3, atol=1e-4)
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    again = opened(model.folder, tmp_path / "saved")[1].eval()
    assert [first(again(*batch.values())) for batch in evaluations] == evaluated
    module.export_model_for_inferencing(tmp_path / "model.onnx", model.outputs)
    assert all(np.isfinite(each).all() for each in stock(tmp_path / "model.onnx", evaluations[0]))


def first(results):
    return float(results[0] if isinstance(results, tuple) else results)


def test_the_command_trains_and_exports(model, tmp_path):
    np.savez(tmp_path / "data.npz", **model.rows())
    out, rows = tmp_path / "out", model.reference["rows"]
    options = ("--epochs", 2, "--batch-size", rows, "--validation", 2 * rows, "--export", tmp_path / "exported.onnx")
    status, text = cli("train", model.folder, "--data", tmp_path / "data.npz", "--output", out, *options)
    assert status == 0, text
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
    status, text = cli("lower", model.folder / "training_model.onnx", "-o", tmp_path / "plain.onnx")
    assert status == 0, text
    state, batch = CheckpointState.load_checkpoint(model.folder / "checkpoint"), model.batches()[0][0]
    feeds = batch | {name: each.data for name, each in state.parameters} | {"lazy_reset_grad": np.ones(1, np.bool_)}
    feeds |= {f"{name}_grad.accumulation.buffer": np.zeros_like(each.data) for name, each in state.parameters}
    loss = stock(tmp_path / "plain.onnx", feeds)[0]
    np.testing.assert_allclose(loss, model.reference["loss_per_step"][0], rtol=1e-5)
    onnx.save(lower(onnx.load(model.folder / "eval_model.onnx")), tmp_path / "eval.onnx")
    assert np.isfinite(stock(tmp_path / "eval.onnx", feeds)[0])

"""Artifact sets with an LSTM and a GRU, as onnxruntime-training 1.19.2 made them, train with its losses."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from opgrad.onnxruntime import lower
from opgrad.training import CheckpointState, Module, Optimizer, artifacts

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
RTOL = 1e-5  # of losses in float32 whose sums are formed in another order, after a few steps


@pytest.fixture(params=["lstm", "gru"])
def folder(request):
    return ARTIFACTS / request.param


def reference_of(folder):
    return json.loads((folder / "reference.json").read_text())


def batches(folder):
    """The inputs of the steps and of the evaluations behind them; artifacts/generate_recurrent.py says more."""
    with np.load(folder / "data.npz") as data:
        arrays = dict(data)
    steps = len(reference_of(folder)["loss_per_step"])
    every = [{name: each[k] for name, each in arrays.items()} for k in range(len(arrays["labels"]))]
    return every[:steps], every[steps:]


def losses(folder, reference):
    """Those of the steps and of the evaluations."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(reference_of(reference)["learning_rate"])
    steps, evaluations = batches(reference)
    found = []
    for batch in steps:
        found.append(float(module(*batch.values())))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    return found, [float(module(*batch.values())) for batch in evaluations]


def check_losses(found, reference):
    np.testing.assert_allclose(found[0], reference_of(reference)["loss_per_step"], rtol=RTOL)
    np.testing.assert_allclose(found[1], reference_of(reference)["eval_loss_per_batch"], rtol=RTOL)


def test_losses_are_those_of_the_original(folder):
    check_losses(losses(folder, folder), folder)


def test_artifacts_of_the_same_model_have_the_same_operators_and_losses(folder, tmp_path):
    """The model, from the eval model of the set: without the loss, its parameters as constants."""
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
    artifacts.generate_artifacts(
        model,
        list(parameters),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    recurrent = [recurrent_operators(each / "training_model.onnx") for each in (folder, tmp_path)]
    assert recurrent[0] == recurrent[1]
    check_losses(losses(tmp_path, folder), folder)


def recurrent_operators(path):
    names = [node.op_type for node in onnx.load(path).graph.node]
    return sorted(name for name in names if name.startswith(("LSTM", "GRU")))


def test_it_runs_lowered(folder):
    """The training model gives the first loss in stock onnxruntime."""
    state, batch = CheckpointState.load_checkpoint(folder / "checkpoint"), batches(folder)[0][0]
    feeds = batch | {name: each.data for name, each in state.parameters} | {"lazy_reset_grad": np.ones(1, np.bool_)}
    feeds |= {f"{name}_grad.accumulation.buffer": np.zeros_like(each.data) for name, each in state.parameters}
    plain = lower(folder / "training_model.onnx")
    onnx.checker.check_model(plain)
    session = onnxruntime.InferenceSession(plain.SerializeToString(), providers=["CPUExecutionProvider"])
    loss = session.run(None, feeds)[0]
    np.testing.assert_allclose(loss, reference_of(folder)["loss_per_step"][0], rtol=RTOL)

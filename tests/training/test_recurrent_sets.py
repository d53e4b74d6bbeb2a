"""The generator makes of a model with an LSTM or a GRU what onnxruntime-training 1.19.2 made of it."""

import numpy as np
import onnx
import pytest
from model_sets import SETS

from opgrad.training import artifacts
from opgrad.training.api import CheckpointState, Module, Optimizer

RTOL = 1e-5  # of losses in float32 whose sums are formed in another order, after a few steps


@pytest.fixture(params=[each for each in SETS if each.name in ("lstm", "gru")], ids=lambda each: each.name)
def original(request):
    return request.param


def losses(folder, original):
    """Those of the steps and of the evaluations."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(original.reference["learning_rate"])
    steps, evaluations = original.batches()
    found = []
    for batch in steps:
        found.append(float(module(*batch.values())))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    return found, [float(module(*batch.values())) for batch in evaluations]


def check_losses(found, reference):
    np.testing.assert_allclose(found[0], reference["loss_per_step"], rtol=RTOL)
    np.testing.assert_allclose(found[1], reference["eval_loss_per_batch"], rtol=RTOL)


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
    artifacts.generate_artifacts(
        model,
        list(parameters),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    recurrent = [recurrent_operators(each / "training_model.onnx") for each in (folder, tmp_path)]
    assert recurrent[0] == recurrent[1]
    check_losses(losses(tmp_path, original), original.reference)


def recurrent_operators(path):
    names = [node.op_type for node in onnx.load(path).graph.node]
    return sorted(name for name in names if name.startswith(("LSTM", "GRU")))

"""Artifacts of opgrad beside those that onnxruntime-training 1.19.2 made of the same models."""

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES

from opgrad.gradients import gradients
from opgrad.onnx.graph import graph as graphs
from opgrad.training import ArtifactSet, Trainer, read_checkpoint
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

FILES = ("training_model.onnx", "eval_model.onnx", "checkpoint", "optimizer_model.onnx")


@pytest.mark.parametrize("name", ["digits", "digits_attention"])
def test_the_contract_of_the_old_package(name, tmp_path):
    old = EXAMPLES / name
    made = generate_artifacts(
        old / "forward.onnx", loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory=tmp_path
    )
    assert (
        made.files
        == FILES
        == tuple(file.name for file in sorted(tmp_path.iterdir(), key=lambda f: FILES.index(f.name)))
    )
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
    generate_artifacts(
        old / "forward.onnx", loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory=tmp_path
    )
    sets = [ArtifactSet.load(folder) for folder in (tmp_path, old)]
    random, data = np.random.default_rng(0), sets[0].inputs[0]
    values = random.random((20, 64), np.float32) if data.dtype == np.float32 else random.integers(0, 17, (20, 64))
    batch = {data.name: values.astype(data.dtype), sets[0].label.name: random.integers(0, 10, 20)}
    mine, theirs = ([trainer.step(batch) for _ in range(4)] for trainer in map(Trainer, sets))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert mine[-1] < mine[0]

"""Artifacts of models whose frozen weights are integers in files beside the model, one or several to a byte."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import normal

from opgrad.training import ArtifactSet, Dataset, Trainer
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.files import tensor_values
from opgrad.training.make import artifacts

DEPTH, WIDTH, BLOCK = 80, 48, 16
KINDS = {"int4": (TensorProto.INT4, -8, 7), "uint4": (TensorProto.UINT4, 0, 15), "int8": (TensorProto.INT8, -128, 127)}
X = np.random.default_rng(3).normal(size=(6, 16)).astype(np.float32)
TARGET = np.random.default_rng(4).normal(size=(6, 3)).astype(np.float32)


def models(kind):
    """y = tanh(x @ a @ w) @ b with w of integers in blocks, and the same with w as floats."""
    number, low, high = KINDS[kind]
    random = np.random.default_rng(5)
    q = random.integers(low, high + 1, (DEPTH, WIDTH))
    scales = (random.uniform(0.5, 1.5, (DEPTH // BLOCK, WIDTH)) / high).astype(np.float32)
    zeros = random.integers(low // 2, high // 2 + 1, scales.shape)
    w = ((q - np.repeat(zeros, BLOCK, 0)) * np.repeat(scales, BLOCK, 0)).astype(np.float32)
    stored = [
        helper.make_tensor(name, number, each.shape, each.reshape(-1)) for name, each in (("q", q), ("zeros", zeros))
    ]
    stored.append(numpy_helper.from_array(scales, "scales"))
    unpack = helper.make_node("DequantizeLinear", ["q", "scales", "zeros"], ["w"], "unpack", axis=0, block_size=BLOCK)
    floats = [numpy_helper.from_array(each, name) for name, each in normal(a=(16, DEPTH), b=(WIDTH, 3)).items()]
    found = []
    for nodes, held in (([unpack], stored), ([], [numpy_helper.from_array(w, "w")])):
        graph = helper.make_graph(
            [
                *nodes,
                helper.make_node("MatMul", ["x", "a"], ["h"], "first"),
                helper.make_node("MatMul", ["h", "w"], ["p"], "second"),
                helper.make_node("Tanh", ["p"], ["t"], "tanh"),
                helper.make_node("MatMul", ["t", "b"], ["y"], "third"),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
            [*held, *floats],
        )
        found.append(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    return found


def trainer_of(model, folder):
    folder.mkdir()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=1500)
    before = (folder / "model.data").read_bytes()
    made = folder / "set"
    made.mkdir()
    options = {"loss": LossType.MSELoss, "optimizer": OptimType.AdamW, "requires_grad": ["a", "b"]}
    generate_artifacts(folder / "model.onnx", artifact_directory=made, **options)
    assert (folder / "model.data").read_bytes() == before
    return Trainer(ArtifactSet.load(made), learning_rate=0.01)


@pytest.mark.parametrize(("kind", "shared"), [("int4", False), ("int4", True), ("uint4", True), ("int8", False)])
def test_trains_as_the_floats_do(kind, shared, tmp_path, monkeypatch):
    """shared: weights are inputs of the sessions, which read the mapped file, as those from 64 MiB on are."""
    monkeypatch.setattr(tensor_values, "HUGE", 1500)
    monkeypatch.setattr(tensor_values, "SHARED_FROM", 0 if shared else 1 << 26)
    monkeypatch.setattr(artifacts, "OUTSIDE_FROM", 1500)
    packed, floats = (trainer_of(model, tmp_path / str(place)) for place, model in enumerate(models(kind)))
    graph = onnx.load(packed.artifacts.directory / "training_model.onnx", load_external_data=False).graph
    assert "QuantizedMatMulGrad" in {node.op_type for node in graph.node}
    assert ("q" in packed.artifacts.constants) == shared
    size = (packed.artifacts.directory / "weights.data").stat().st_size
    assert size < 2 * 4096 + DEPTH * WIDTH + 8192  # the bytes are there once, each tensor at a multiple of 4,096
    batch = {"x": X, "target": TARGET}
    losses = [[each.step(batch) for _ in range(4)] for each in (packed, floats)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    data = Dataset(batch, packed.artifacts.axes)
    assert packed.evaluate(data).loss == pytest.approx(floats.evaluate(data).loss, rel=1e-5)
    packed.check_export()
    packed.export(tmp_path / "out.onnx")
    stored = {each.name: each for each in onnx.load(tmp_path / "out.onnx").graph.initializer}
    expected = {each.name: each for each in models(kind)[0].graph.initializer}
    assert stored["q"].data_type == KINDS[kind][0]
    np.testing.assert_array_equal(*(numpy_helper.to_array(each["q"]) for each in (stored, expected)))
    floats.export(tmp_path / "floats.onnx")
    np.testing.assert_allclose(*(scores(tmp_path / name) for name in ("out.onnx", "floats.onnx")), rtol=1e-4, atol=1e-5)


def scores(path):
    """In stock onnxruntime; its optimizations would round x to 8 bits beside weights of 4."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]

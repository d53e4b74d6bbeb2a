"""Groups of nodes that become one: what is replaced, what stays, and that results are the same."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnxruntime import InferenceSession
from opgrad.training import CheckpointState, Module
from opgrad.training.artifacts import LossType, generate_artifacts
from opgrad.training.fusions import fuse
from opgrad.training.inspection import inspect

FLOAT = TensorProto.FLOAT


def graph(activation="Gelu", kind=FLOAT, bias=(8,), outputs=(), extra=()) -> onnx.ModelProto:
    """Sum, activation and its gradient, whose sums are the gradient of the bias."""
    nodes = [
        helper.make_node("MatMul", ["a", "w"], ["x"]),
        helper.make_node("Add", ["x", "b"], ["s"]),
        helper.make_node(activation, ["s"], ["y"], domain="com.microsoft"),
        helper.make_node(f"{activation}Grad", ["dy", "s"], ["dx"], domain="com.microsoft"),
        *extra,
    ]
    shapes = {"a": (2, 3, 4), "w": (4, 8), "b": bias, "dy": (2, 3, 8)}
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    made = [helper.make_tensor_value_info(name, kind, None) for name in ("y", "dx", *outputs)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, made), opset_imports=imports, ir_version=9)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    feeds = {
        each.name: random.standard_normal([dim.dim_value for dim in each.type.tensor_type.shape.dim]).astype("f")
        for each in model.graph.input
    }
    return InferenceSession(model.SerializeToString()).run(None, feeds)


@pytest.mark.parametrize("activation", ["Gelu", "FastGelu"])
def test_a_bias_becomes_part_of_the_activation_and_its_gradient(activation):
    model, plain = graph(activation), graph(activation)
    (fused,) = fuse(model)
    assert fused.value == "s"
    assert [each.op_type for each in model.graph.node] == ["MatMul", *fused.by]
    for ours, theirs in zip(run(model), run(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [
        {"outputs": ("s",)},
        {"outputs": ("z",), "extra": (helper.make_node("Relu", ["s"], ["z"]),)},
        {"bias": (1,)},
        {"bias": (3, 8)},
        {"kind": TensorProto.DOUBLE},
    ],
)
def test_what_others_read_and_what_is_no_bias_stays(changed):
    model, plain = graph(**changed), graph(**changed)
    assert fuse(model) == []
    assert model == plain


def test_training_steps_are_the_same_with_and_without(tmp_path):
    random = np.random.default_rng(0)
    arrays = {"w": random.standard_normal((4, 8)), "b": random.standard_normal(8), "v": random.standard_normal((8, 3))}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["s"]),
        helper.make_node("Gelu", ["s"], ["g"], domain="com.microsoft"),
        helper.make_node("MatMul", ["g", "v"], ["y"]),
    ]
    ports = [[helper.make_tensor_value_info(name, FLOAT, ["n", size])] for name, size in (("x", 4), ("y", 3))]
    weights = [numpy_helper.from_array(array.astype("f"), name) for name, array in arrays.items()]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_graph(nodes, "g", *ports, weights)
    model = helper.make_model(made, opset_imports=imports, ir_version=9)
    generate_artifacts(model, requires_grad=list(arrays), loss=LossType.MSELoss, artifact_directory=tmp_path)
    assert [each.by for each in inspect(tmp_path).fused] == [("BiasGelu", "BiasGeluGrad_dX")]
    x, target = (random.standard_normal((5, size)).astype("f") for size in (4, 3))
    found = []
    for together in (True, False):
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        module = Module(tmp_path / "training_model.onnx", state, fuse=together)
        loss = module(x, target)
        found.append([loss, *module.gradients.values()])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)

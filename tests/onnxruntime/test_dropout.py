"""Dropout in training graphs: the forward node is stock onnxruntime's, the gradient ours."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx_models import one_node, run

from opgrad import dropout, dropout_grad
from opgrad.contract import DTYPES, FLOATS
from opgrad.onnxruntime import InferenceSession


@pytest.mark.parametrize("dtype", FLOATS)
def test_seed_that_is_an_input(dtype, rng):
    x, seed = rng.normal(size=(5, 37)).astype(DTYPES[dtype]), np.array([7], np.int64)
    ports = [("x", dtype), ("seed", "int64"), ("ratio", "float32")]
    model = one_node("DropoutTraining", ports, [("y", dtype), ("mask", "bool")])
    y, mask = run(model, {"x": x, "seed": seed, "ratio": np.array(0.3, np.float32)})
    expected, kept = dropout(x, float(np.float32(0.3)), seed=7)
    np.testing.assert_array_equal(y.astype(DTYPES[dtype]), expected)
    np.testing.assert_array_equal(mask, kept)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient(dtype, rng):
    dy = rng.normal(size=(5, 37)).astype(DTYPES[dtype])
    mask = rng.random((5, 37)) > 0.5
    ports = [("dy", dtype), ("mask", "bool")]
    (dx,) = run(one_node("DropoutGrad", ports, [("dx", dtype)]), {"dy": dy, "mask": mask})
    np.testing.assert_array_equal(dx.astype(DTYPES[dtype]), dropout_grad(dy, mask))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("mode", [None, True, False])
def test_ratio_and_training_mode(dtype, mode, rng):
    dy, mask = rng.normal(size=(5, 37)).astype("f4"), rng.random((5, 37)) > 0.5
    for ratio in (0.0, 0.25, 1.0, np.array([0.5])):
        feeds = {"dy": dy, "mask": mask, "ratio": np.asarray(ratio, dtype)}
        ports = [("dy", "float32"), ("mask", "bool"), ("ratio", dtype)]
        if mode is not None:
            feeds["mode"] = np.asarray(mode)
            ports.append(("mode", "bool"))
        (dx,) = run(one_node("DropoutGrad", ports, [("dx", "float32")]), feeds)
        expected = dropout_grad(dy, mask, float(np.asarray(ratio).item()), mode is not False)
        np.testing.assert_array_equal(dx, expected)


def test_without_ratio(rng):
    dy, mask = rng.normal(size=(5, 37)).astype("f4"), rng.random((5, 37)) > 0.5
    ports = [("dy", "float32"), ("mask", "bool"), None, ("mode", "bool")]
    feeds = {"dy": dy, "mask": mask, "mode": np.asarray(True)}
    (dx,) = run(one_node("DropoutGrad", ports, [("dx", "float32")]), feeds)
    np.testing.assert_array_equal(dx, dropout_grad(dy, mask, 0.5))


def test_a_ratio_that_is_no_probability():
    ports = [("dy", "float32"), ("mask", "bool"), ("ratio", "float32")]
    feeds = {"dy": np.ones(3, "f4"), "mask": np.ones(3, bool), "ratio": np.asarray(1.5, "f4")}
    with pytest.raises(Exception, match=r"dropout_grad: ratio is 1\.5, expected 0 to 1"):
        run(one_node("DropoutGrad", ports, [("dx", "float32")]), feeds)


def test_the_forward_node_is_onnxruntime_s(rng):
    """With a seed and training_mode, as training graphs have it; its mask is what our gradient takes."""
    nodes = [
        helper.make_node("Dropout", ["x", "ratio", "mode"], ["y", "mask"], seed=7),
        helper.make_node("DropoutGrad", ["dy", "mask", "ratio", "mode"], ["dx"], domain="com.microsoft"),
    ]
    types = {"x": TensorProto.FLOAT, "ratio": TensorProto.FLOAT, "mode": TensorProto.BOOL, "dy": TensorProto.FLOAT}
    feeds = [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()]
    kinds = {"y": TensorProto.FLOAT, "mask": TensorProto.BOOL, "dx": TensorProto.FLOAT}
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "dropout", feeds, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    x, dy = rng.normal(size=(50, 37)).astype("f4"), rng.normal(size=(50, 37)).astype("f4")
    given = {"x": x, "ratio": np.asarray(0.25, "f4"), "mode": np.asarray(True), "dy": dy}
    onnxruntime.set_seed(0)
    session = InferenceSession(model)
    y, mask, dx = session.run(None, given)
    assert 0.15 < 1 - mask.mean() < 0.35
    np.testing.assert_allclose(y, np.where(mask, x / 0.75, 0), rtol=1e-6)
    np.testing.assert_allclose(dx, np.where(mask, dy / 0.75, 0), rtol=1e-6)
    np.testing.assert_array_equal(InferenceSession(model).run(None, given)[1], mask)
    assert (session.run(None, given)[1] != mask).any()

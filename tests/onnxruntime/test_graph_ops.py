"""The operators of training graphs in stock onnxruntime, on their examples and as single nodes, against references."""

import functools

import numpy as np
import onnxruntime
import pytest
from graph_cases import CASES as PAIRS
from graph_cases import OPERATORS, call, check_close
from onnx import TensorProto, helper
from onnx_models import one_node, outside, run
from operator_nodes import OVERLOADS, attributes_of, feeds_of, placed, shapes_of, takes

import opgrad
from opgrad import dropout, dropout_grad
from opgrad.cli.examples import examples, expected
from opgrad.cli.examples import expected as reference
from opgrad.contract import DTYPES, FLOATS, INTEGERS
from opgrad.onnxruntime import InferenceSession
from opgrad.onnxruntime.overloads import overloads
from opgrad.ops import graph_operators

CASES = [(op, onnx) for op in OPERATORS for onnx in op.onnx]
each_case = pytest.mark.parametrize(("op", "onnx"), CASES, ids=[onnx.name for _, onnx in CASES])
TYPED = [(op, onnx, dtype) for op, onnx in CASES for dtype in FLOATS if (op, dtype) in PAIRS]
each_dtype = pytest.mark.parametrize(("op", "onnx", "dtype"), TYPED, ids=[f"{o.name}-{d}" for _, o, d in TYPED])


@each_dtype
def test_against_the_reference(op, onnx, dtype):
    """Examples that differ in shapes alone, which the model does not tell, go through one session."""
    session = functools.cache(InferenceSession)
    for example in examples(op, dtype):
        inputs = feeds_of(op, onnx, example.arguments)
        if not takes(onnx, inputs):
            continue
        exact = expected(op, example.arguments)
        wanted = [array.dtype for array in call(op, example.arguments)]
        attributes = attributes_of(op, onnx, example.arguments)
        ports = [port and port[:2] for port in inputs]
        feeds = {port[0]: port[2] for port in inputs if port}
        # Some results are written over an input.
        before = {name: array.copy() for name, array in feeds.items()}
        outputs = placed(op, onnx, example.arguments, [(f"result{i}", each.name) for i, each in enumerate(wanted)])
        more = {"domain": onnx.origin, "shapes": shapes_of(op, onnx, example.arguments)}
        found = session(one_node(onnx.name, ports, outputs, **more, **attributes)).run(None, outside(feeds))
        found = [array.astype(each) for array, each in zip(found, wanted, strict=True)]
        check_close(found, exact, example.terms)
        needed = [o for o, name in zip(outputs, onnx.outputs, strict=False) if "?" not in name]
        if len(onnx.outputs) > 1 and len(needed) < len(onnx.outputs):
            model = one_node(onnx.name, ports, outputs[: max(1, len(needed))], **more, **attributes)
            fewer = session(model).run(None, outside(before))
            for less, full in zip(fewer, found, strict=False):
                assert less.astype(full.dtype).tobytes() == full.tobytes()


@each_case
def test_registered_for_every_float_that_the_operator_takes(op, onnx):
    taken = {name for tensor in op.inputs.values() for name in tensor.dtypes} & set(FLOATS)
    registered = {port.dtype for overload in OVERLOADS[onnx.name] for port in overload.inputs}
    assert taken <= registered


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "attributes"), [((2, 1, 1, 33), (3, 1)), ((4, 33), (3, 0)), ((4, 33), (-2, 0))])
def test_bias_softmax(dtype, shape, attributes, rng):
    given = dict(zip(("axis", "is_inner_broadcast"), attributes, strict=True))
    op = graph_operators()["bias_softmax"]
    feeds = {"x": rng.normal(size=(2, 3, 4, 33)).astype(DTYPES[dtype]), "bias": rng.normal(size=shape)}
    feeds["bias"] = feeds["bias"].astype(DTYPES[dtype])
    (y,) = run(one_node("BiasSoftmax", [(name, dtype) for name in feeds], [("y", dtype)], **given), feeds)
    check_close([y.astype(DTYPES[dtype])], reference(op, {**feeds, **given}), 4 * 33)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ratio", [None, "float32", "float16"])
def test_softmax_dropout_grad(dtype, ratio, rng):
    op = graph_operators()["softmax_dropout_grad"]
    y = np.exp(rng.normal(size=(2, 4, 33)))
    feeds = {"dy": rng.normal(size=y.shape).astype(DTYPES[dtype]), "mask": y > 0.5}
    feeds["y"] = (y / y.sum((1, 2), keepdims=True)).astype(DTYPES[dtype])
    ports = [("dy", dtype), ("mask", "bool"), ("y", dtype)]
    expected = reference(op, {**feeds, "axis": 1, "ratio": 0.25 if ratio else 0.5})
    if ratio:
        feeds["ratio"] = np.asarray(0.25, ratio)
        ports.append(("ratio", ratio))
    (dx,) = run(one_node("SoftmaxDropoutGrad", ports, [("dx", dtype)], axis=1), feeds)
    check_close([dx.astype(DTYPES[dtype])], expected, 4 * 33)


NODES = {
    "GeluGrad": "gelu_grad",
    "FastGeluGrad": "fast_gelu_grad",
    "BiasGeluGrad_dX": "bias_gelu_grad_dx",
    "BiasFastGeluGrad_dX": "bias_fast_gelu_grad_dx",
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op_type", NODES)
def test_node(op_type, dtype, rng):
    op = graph_operators()[NODES[op_type]]
    feeds = {name: rng.normal(0, 2, (5, 37)).astype(DTYPES[dtype]) for name in ("dy", "x")}
    if "bias" in op.inputs:
        feeds["bias"] = rng.normal(size=37).astype(DTYPES[dtype])
    model = one_node(op_type, [(name, dtype) for name in feeds], [("dx", dtype)])
    (dx,) = run(model, feeds)
    check_close([dx.astype(DTYPES[dtype])], reference(op, feeds), 1)


@pytest.mark.parametrize("op_type", ["BiasGeluGrad_dX", "BiasFastGeluGrad_dX"])
def test_a_bias_of_another_length(op_type):
    model = one_node(op_type, [(name, "float32") for name in ("dy", "x", "bias")], [("dx", "float32")])
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(Exception, match=rf"{NODES[op_type]}: bias has shape \(2,\), expected \(3,\)"):
        run(model, {"dy": x, "x": x, "bias": x[:, 0]})


REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = (["loss"], ["loss", "log_prob"], ["loss"])


def node(op_type, name, feeds, dtype, outputs, reduction):
    """The node's results and the reference's."""
    ports = [(each, dtype if array.dtype.kind not in "iu" else array.dtype.name) for each, array in feeds.items()]
    cast = {each: array if array.dtype.kind in "iu" else array.astype(DTYPES[dtype]) for each, array in feeds.items()}
    model = one_node(op_type, ports, [(each, dtype) for each in outputs], reduction=reduction)
    results = [array.astype(DTYPES[dtype]) for array in run(model, cast)]
    return results, reference(graph_operators()[name], {**cast, "reduction": reduction})[: len(outputs)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("outputs", "reduction"), list(zip(OUTPUTS, REDUCTIONS, strict=True)))
def test_dense(dtype, outputs, reduction, rng):
    labels = np.abs(rng.normal(size=(5, 6, 33)))
    feeds = {"logits": rng.normal(size=labels.shape), "labels": labels / labels.sum(-1, keepdims=True)}
    results, expected = node("SoftmaxCrossEntropy", "softmax_cross_entropy", feeds, dtype, outputs, reduction)
    check_close(results, expected, 33)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_dense_gradient(dtype, reduction, rng):
    labels = np.abs(rng.normal(size=(5, 33)))
    dy = np.asarray(rng.normal(size=5 if reduction == "none" else ()))
    feeds = {"dy": dy, "log_prob": -labels, "labels": labels}
    name = "softmax_cross_entropy_grad"
    results, expected = node("SoftmaxCrossEntropyGrad", name, feeds, dtype, ["dlogits"], reduction)
    check_close(results, expected, 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("labels", "reduction"), list(zip(("int32", "int64", "int64"), REDUCTIONS, strict=True)))
@pytest.mark.parametrize("weighted", [False, True])
def test_sparse(dtype, labels, reduction, weighted, rng):
    feeds = {"logits": rng.normal(size=(5, 6, 33)), "labels": rng.integers(0, 33, (5, 6)).astype(labels)}
    feeds |= {"weight": rng.random((5, 6))} if weighted else {}
    outputs = ["loss", "log_prob"] if weighted else ["loss"]
    name = "sparse_softmax_cross_entropy"
    results, expected = node("SparseSoftmaxCrossEntropy", name, feeds, dtype, outputs, reduction)
    check_close(results, expected, 33)
    dy = np.asarray(rng.normal(size=(5, 6) if reduction == "none" else ()))
    given = {"dy": dy, "log_prob": -np.abs(feeds.pop("logits")), **feeds}
    results, expected = node("SparseSoftmaxCrossEntropyGrad", f"{name}_grad", given, dtype, ["dlogits"], reduction)
    check_close(results, expected, 1)


def test_a_wrong_label():
    feeds = {"logits": np.zeros((2, 3), "f4"), "labels": np.array([0, 3])}
    model = one_node("SparseSoftmaxCrossEntropy", [("logits", "float32"), ("labels", "int64")], [("loss", "float32")])
    with pytest.raises(Exception, match=r"sparse_softmax_cross_entropy: labels\[1\] is 3, expected 0 to 2"):
        run(model, feeds)


def test_scales_and_sizes(rng):
    """Scales from an input, sizes from the shapes; empty arrays stand for missing ones, as 1.19.2 takes them."""
    inputs = [("dy", "float32"), ("x", "float32"), ("roi", "float32"), ("scales", "float32")]
    attributes = {"mode": "linear", "nearest_mode": "floor", "extrapolation_value": 0.0, "cubic_coeff_a": -0.75}
    attributes["coordinate_transformation_mode"] = "pytorch_half_pixel"
    session = opgrad.onnxruntime.InferenceSession(one_node("ResizeGrad", inputs, [("dx", "float32")], **attributes))
    none = np.zeros(0, np.float32)
    for batch, scales in ((2, (1.0, 1.0, 2.0, 3.0)), (3, (1.0, 1.0, 2.0, 3.0)), (2, (1.0, 1.0, 2.2, 1.9)), (2, ())):
        x = rng.normal(size=(batch, 3, 4, 5)).astype(np.float32)
        sizes = (int(4 * scales[2]), int(5 * scales[3])) if scales else (7, 9)
        dy = rng.normal(size=(batch, 3, *sizes)).astype(np.float32)
        feeds = {"dy": dy, "x": x, "roi": none, "scales": np.array(scales, np.float32)}
        rounded = tuple(np.array(scales, np.float32).tolist())
        form = {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}
        (found,) = session.run(None, feeds)
        assert found.tobytes() == opgrad.resize_grad(dy, x, scales=rounded, **form).tobytes()


def test_regions_and_axes(rng):
    inputs = [("dy", "float16"), ("x", "float16"), ("roi", "float32")]
    form = {"mode": "cubic", "coordinate_transformation_mode": "tf_crop_and_resize", "exclude_outside": 1}
    model = one_node("ResizeGrad", inputs, [("dx", "float16")], axes=[2, 3], **form)
    x, dy = (rng.normal(size=shape).astype(np.float16) for shape in ((1, 2, 6, 5), (1, 2, 4, 9)))
    roi = np.array([0.1, 0.2, 0.9, 1.1], np.float32)
    (found,) = run(model, {"dy": dy, "x": x, "roi": roi})
    expected = opgrad.resize_grad(dy, x, roi=tuple(roi.tolist()), axes=(2, 3), **{**form, "exclude_outside": True})
    assert found.tobytes() == expected.tobytes()


def test_shapes_that_do_not_go_together(rng):
    model = one_node(
        "ResizeGrad", [("dy", "float32"), ("x", "float32"), None, ("scales", "float32")], [("dx", "float32")]
    )
    feeds = {"dy": np.zeros((1, 1, 9, 8), "f"), "x": np.zeros((1, 1, 4, 4), "f"), "scales": np.array([1, 1, 4, 2], "f")}
    with pytest.raises(Exception, match=r"resize_grad: dy has 9 elements along axis 2, expected 4 \* 4 elements"):
        run(model, feeds)


PICKING = graph_operators()
NAMES = {"GatherElementsGrad": "gather_elements_grad", "GatherNDGrad": "gather_nd_grad", "SliceGrad": "slice_grad"}


def check(name, inputs, **attributes):
    """Run a node whose inputs are given in ONNX's order, None for absent ones."""
    ports = [None if array is None else (parameter, array.dtype.name) for parameter, array in inputs.items()]
    dtype = inputs["dy"].dtype.name
    feeds = {parameter: array for parameter, array in inputs.items() if array is not None}
    (found,) = run(one_node(name, ports, [("dx", dtype)], **attributes), feeds)
    values = {
        parameter: array if parameter in ("dy", "indices") else tuple(array.tolist())
        for parameter, array in feeds.items()
    }
    op = PICKING[NAMES[name]]
    check_close([found.astype(inputs["dy"].dtype)], expected(op, values | attributes), 8)


def test_every_dtype_is_registered():
    for name in NAMES:
        mine = [overload for overload in overloads() if overload.onnx.name == name]
        dtypes = {tuple(port.dtype for port in overload.inputs) for overload in mine}
        assert len(dtypes) == len(mine) == len(FLOATS) * len(INTEGERS)


@pytest.mark.parametrize("integer", INTEGERS)
def test_gather_elements_grad(dtype, integer, rng):
    for shape, given, axis in (((3, 4), (2, 6), 1), ((5,), (3,), 0), ((2, 7, 3), (2, 4, 3), -2)):
        indices = rng.integers(-shape[axis], shape[axis], given).astype(integer)
        inputs = {"dy": rng.normal(size=given).astype(DTYPES[dtype]), "shape": np.array(shape), "indices": indices}
        check("GatherElementsGrad", inputs, axis=axis)
    check("GatherElementsGrad", inputs | {"indices": indices % 2})


@pytest.mark.parametrize("integer", INTEGERS)
def test_gather_nd_grad(dtype, integer, rng):
    for shape, given, batch in (((3, 4), (6, 2), 0), ((2, 5, 3), (2, 4, 1), 1), ((2, 5, 3), (4, 1), 0)):
        sizes = shape[batch : batch + given[-1]]
        indices = np.stack([rng.integers(-size, size, given[:-1]) for size in sizes], -1).astype(integer)
        dy = rng.normal(size=given[:-1] + shape[batch + given[-1] :]).astype(DTYPES[dtype])
        inputs = {"shape": np.array(shape), "indices": indices, "dy": dy}
        check("GatherNDGrad", inputs, **({"batch_dims": batch} if batch else {}))


@pytest.mark.parametrize("integer", INTEGERS)
def test_slice_grad(dtype, integer, rng):
    dy = rng.normal(size=(2, 2)).astype(DTYPES[dtype])
    starts, ends, axes, steps = (np.array(each, integer) for each in ((4, 0), (-100, 4), (-1, 0), (-3, 2)))
    every = {"dy": dy, "shape": np.array((4, 5)), "starts": starts, "ends": ends, "axes": axes, "steps": steps}
    check("SliceGrad", every)
    full = {"dy": rng.normal(size=(2, 5)).astype(DTYPES[dtype]), "shape": np.array((4, 5))}
    first = {"starts": np.array([1], integer), "ends": np.array([-1], integer)}
    check("SliceGrad", full | first)
    check("SliceGrad", full | first | {"axes": None, "steps": np.array([1], integer)})
    check("SliceGrad", full | first | {"axes": np.array([0], integer)})


def test_messages_reach_the_caller():
    inputs = [("dy", "float32"), ("shape", "int64"), ("indices", "int64")]
    model = one_node("GatherElementsGrad", inputs, [("dx", "float32")], axis=1)
    feeds = {"dy": np.ones((1, 3), np.float32), "shape": np.array([1, 4]), "indices": np.array([[0, 4, 2]])}
    with pytest.raises(Exception, match=r"gather_elements_grad: indices\[0, 1\] is 4, expected -4 to 3"):
        run(model, feeds)
    inputs = [("dy", "float32"), ("shape", "int64"), ("starts", "int64"), ("ends", "int64")]
    feeds = {"dy": np.ones((3, 5), np.float32), "shape": np.array([4, 5]), "starts": np.zeros(1, int), "ends": [2]}
    with pytest.raises(Exception, match=r"slice_grad: dy has shape \(3, 5\), expected \(2, 5\)"):
        run(one_node("SliceGrad", inputs, [("dx", "float32")]), feeds)


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

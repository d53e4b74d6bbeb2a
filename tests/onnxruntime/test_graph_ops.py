"""The operators of training graphs in stock onnxruntime, on their examples and as single nodes, against references."""

import functools

import numpy as np
import onnxruntime
import pytest
from graph_cases import CASES as PAIRS
from graph_cases import OPERATORS, call, check_close
from onnx import parser
from onnx_models import one_node, outside, run, run_node
from operator_nodes import OVERLOADS, attributes_of, feeds_of, placed, shapes_of, takes

import opgrad
from opgrad import dropout, dropout_grad
from opgrad.cli.examples import examples, expected
from opgrad.contract import FLOATS, INTEGERS
from opgrad.onnxruntime import InferenceSession
from opgrad.ops import graph_operators

CASES = [(op, onnx) for op in OPERATORS for onnx in op.onnx]
each_case = pytest.mark.parametrize(("op", "onnx"), CASES, ids=[onnx.name for _, onnx in CASES])
TYPED = [(op, onnx, dtype) for op, onnx in CASES for dtype in FLOATS if (op, dtype) in PAIRS]
each_dtype = pytest.mark.parametrize(("op", "onnx", "dtype"), TYPED, ids=[f"{o.name}-{d}" for _, o, d in TYPED])


@each_dtype
@pytest.mark.one_in(3)
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


@pytest.mark.parametrize("ratio", [None, "float16"])
def test_softmax_dropout_grad(ratio, rng):
    op = graph_operators()["softmax_dropout_grad"]
    y = np.exp(rng.normal(size=(2, 4, 33)))
    feeds = {"dy": rng.normal(size=y.shape).astype("f4"), "mask": y > 0.5}
    feeds["y"] = (y / y.sum((1, 2), keepdims=True)).astype("f4")
    exact = expected(op, {**feeds, "axis": 1, "ratio": 0.25 if ratio else 0.5})
    feeds |= {"ratio": np.asarray(0.25, ratio)} if ratio else {}
    check_close(run_node("SoftmaxDropoutGrad", feeds, axis=1), exact, 4 * 33)


X = np.zeros((2, 3), "f4")
REFUSED = [  # a node's name, its inputs, and what is said of them
    ("BiasGeluGrad_dX", {"dy": X, "x": X, "bias": X[:, 0]},
     r"bias_gelu_grad_dx: bias has shape \(2,\), expected \(3,\)"),
    ("BiasFastGeluGrad_dX", {"dy": X, "x": X, "bias": X[:, 0]},
     r"bias_fast_gelu_grad_dx: bias has shape \(2,\), expected \(3,\)"),
    ("SparseSoftmaxCrossEntropy", {"logits": X, "labels": np.array([0, 3])},
     r"sparse_softmax_cross_entropy: labels\[1\] is 3, expected 0 to 2"),
    ("ResizeGrad", {"dy": np.zeros((1, 1, 9, 8), "f4"), "x": np.zeros((1, 1, 4, 4), "f4"), "roi": None,
                    "scales": np.array([1, 1, 4, 2], "f4")},
     r"resize_grad: dy has 9 elements along axis 2, expected 4 \* 4 elements"),
    ("GatherElementsGrad", {"dy": np.ones((3, 1), "f4"), "shape": np.array([4, 1]), "i": np.array([[0], [4], [2]])},
     r"gather_elements_grad: indices\[1, 0\] is 4, expected -4 to 3"),
    ("SliceGrad", {"dy": np.ones((3, 5), "f4"), "shape": np.array([4, 5]), "starts": np.zeros(1, int),
                   "ends": np.array([2])}, r"slice_grad: dy has shape \(3, 5\), expected \(2, 5\)"),
    ("DropoutGrad", {"dy": np.ones(3, "f4"), "mask": np.ones(3, bool), "ratio": np.asarray(1.5, "f4")},
     r"dropout_grad: ratio is 1\.5, expected 0 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("op_type", "feeds", "message"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_messages_reach_the_caller(op_type, feeds, message):
    with pytest.raises(Exception, match=message):
        run_node(op_type, feeds)


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


NAMES = {"GatherElementsGrad": "gather_elements_grad", "GatherNDGrad": "gather_nd_grad", "SliceGrad": "slice_grad"}


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_registered(name):
    dtypes = {tuple(port.dtype for port in overload.inputs) for overload in OVERLOADS[name]}
    assert len(dtypes) == len(OVERLOADS[name]) == len(FLOATS) * len(INTEGERS)


@pytest.mark.parametrize("name", ["GatherElementsGrad", "GatherNDGrad"])
def test_indices_of_int32(name):
    op = graph_operators()[NAMES[name]]
    for example in examples(op, "float32"):
        given = {**example.arguments, "indices": example.arguments["indices"].astype("int32")}
        feeds = {each: array for each, _, array in feeds_of(op, op.onnx[0], given)}
        found = run_node(name, feeds, **attributes_of(op, op.onnx[0], given))
        check_close(found, expected(op, given), example.terms)


def test_slices_of_int32(rng):
    limits = {"starts": (4, 0), "ends": (-100, 4), "axes": (-1, 0), "steps": (-3, 2)}
    feeds = {"dy": rng.normal(size=(2, 2)).astype("f4"), "shape": np.array((4, 5))}
    found = run_node("SliceGrad", feeds | {name: np.array(each, "int32") for name, each in limits.items()})
    check_close(found, expected(graph_operators()["slice_grad"], {"dy": feeds["dy"], "shape": (4, 5), **limits}), 8)


def test_seed_that_is_an_input(rng):
    x, seed = rng.normal(size=(5, 37)).astype("f4"), np.array([7], np.int64)
    ports = [("x", "float32"), ("seed", "int64"), ("ratio", "float32")]
    model = one_node("DropoutTraining", ports, [("y", "float32"), ("mask", "bool")])
    found = run(model, {"x": x, "seed": seed, "ratio": np.array(0.3, np.float32)})
    for each, exact in zip(found, dropout(x, float(np.float32(0.3)), seed=7), strict=True):
        np.testing.assert_array_equal(each, exact)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("mode", [None, True, False])
def test_ratio_and_training_mode(dtype, mode, rng):
    dy, mask = rng.normal(size=(5, 37)).astype("f4"), rng.random((5, 37)) > 0.5
    for ratio in (0.0, 0.25, 1.0, np.array([0.5]), None):
        feeds = {"dy": dy, "mask": mask, "ratio": None if ratio is None else np.asarray(ratio, dtype)}
        feeds |= {} if mode is None else {"mode": mode}
        expected = dropout_grad(dy, mask, 0.5 if ratio is None else float(np.asarray(ratio).item()), mode is not False)
        np.testing.assert_array_equal(run_node("DropoutGrad", feeds)[0], expected)


def test_the_forward_node_is_onnxruntime_s(rng):
    """With a seed and training_mode, as training graphs have it; its mask is what our gradient takes."""
    text = """<ir_version: 8, opset_import: ["": 15, "com.microsoft": 1]>
        g (float[n, m] x, float ratio, bool mode, float[n, m] dy) => (float[n, m] y, bool[n, m] mask, float[n, m] dx) {
            y, mask = Dropout <seed = 7> (x, ratio, mode)
            dx = com.microsoft.DropoutGrad (dy, mask, ratio, mode)
        }"""
    model = parser.parse_model(text).SerializeToString()
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

"""Sizes without a number: names that stand for one size, vague ones, and any name that tools and people write."""

import numpy as np
import onnx
import pytest
from differences import build, computed, run
from gradient_cases import numbers
from onnx import TensorProto, helper

from opgrad.gradients import gradients
from opgrad.onnx.graph import inference
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.sizes import VAGUE, sizes_in
from opgrad.onnxruntime import lower

NAMES = ("?", "", "-1", "unk__3", "None", "unknown", " ? ")


def floats(*shape, seed=0):
    return numbers(*shape, seed=seed).astype(np.float32)


# What is computed of x and b, and what x and b are: with sizes that a graph could take for equal ones, and are not.
CASES = {
    "Mul": ("y = Mul(x, b)", (3, 4), (1, 4)),
    "Add, more axes": ("y = Add(x, b)", (2, 3, 4), (3, 1)),
    "Where": ("c = Greater(x, b)\n y = Where(c, x, b)", (3, 4), (3, 1)),
    "MatMul": ("y = MatMul(x, b)", (5, 2, 3), (1, 3, 2)),
    "Expand": ("s = Shape(x)\n e = Expand(b, s)\n y = Mul(e, x)", (3, 4), (3, 1)),
    "Reshape": ("k = Constant <value_ints = [2, 6]> ()\n r = Reshape(x, k)\n m = MatMul(r, b)\n y = Mul(m, m)",
                (3, 4), (6, 2)),
    "Transpose": ("t = Transpose <perm = [1, 0]> (x)\n m = Mul(t, b)\n y = Mul(m, m)", (3, 4), (1, 3)),
    "Max": ("y = Max(x, b)", (3, 4), (1, 4)),
    "Einsum": ('y = Einsum <equation = "...ij,...jk->...ik"> (x, b)', (2, 3, 4), (1, 4, 5)),
}  # fmt: skip


def model_of(name, size):
    """The model of a case with this name, or None, for every size of its inputs and of what it makes."""
    body, *shapes = CASES[name]
    model = build(f"g (float x, float b) => (float[] y) {{ {body} }}")
    for value, shape in zip(model.graph.input, shapes, strict=True):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, [size] * len(shape)))
    rank = len(onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape.dim)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [size] * rank))
    return model, {key: floats(*shape) for key, shape in zip("xb", shapes, strict=True)}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("name", "size"), [("Mul", size) for size in NAMES[1:]] + [(name, "?") for name in CASES])
def test_gradients_have_the_shapes_of_their_values(name, size, plain):
    model, feeds = model_of(name, size)
    wanted = list(feeds)
    graph = gradients(model, "y", wanted, plain=plain)
    results = run(graph, feeds) if plain else computed(graph, feeds, plain)
    found = dict(zip(["y", *wanted], results, strict=True))
    open_model, _ = model_of(name, None)
    expected = run(gradients(open_model, "y", wanted, plain=True), feeds)[1:]
    for key, other in zip(wanted, expected, strict=True):
        assert found[key].shape == feeds[key].shape
        np.testing.assert_allclose(found[key], other, rtol=1e-5, atol=1e-5)


def test_names_stay_names():
    for name in ("N", "batch_size", "x1", "unk", "unknown", "s0", "unk2", "DynamicDimension.0"):
        assert bool(VAGUE.fullmatch(name)) == (name in ("unk", "unknown")), name
    for name in (*NAMES, "-2", "?x?", "unk__12", "NONE"):
        assert VAGUE.fullmatch(name), name


def test_a_graph_tells_of_sizes_what_is_certain():
    model = build("g (float x) => (float y) { y = Mul(x, x) }")
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "?", 3, -1]))
    assert list(Graph(model).sizes("x")) == ["N", None, 3, None]
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param for dim in dims] == ["N", "?", "", ""]  # the model itself keeps its names


def test_names_that_two_runs_of_inference_made_up_are_not_mixed(monkeypatch):
    """The second run knows nothing of y, so that its unk__0 is the size of another value."""
    runs = iter([{"x": ["unk__0"], "y": ["unk__0", "N", 3]}, {"x": ["unk__0"], "y": None}])

    def inferred(*_):
        tensor = onnx.TensorProto.FLOAT
        found = next(runs).items()
        return {name: onnx.helper.make_tensor_type_proto(tensor, sizes).tensor_type for name, sizes in found}, {}

    monkeypatch.setattr(inference, "_inferred", inferred)
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float y) {}')
    found, _ = inference.infer(model, lambda types, nodes: {})
    assert {name: sizes_in(each) for name, each in found.items()} == {"x": ["unk__0"], "y": [None, "N", 3]}


CLASSICAL = {
    "Imputer": {"imputed_value_floats": [0.5]},
    "Scaler": {"offset": [0.1], "scale": [2.0]},
    "Normalizer": {"norm": "L2"},
    "TreeEnsembleRegressor": {
        "n_targets": 2, "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 1],
        "target_weights": [1.0, 2.0],
    },
}  # fmt: skip


@pytest.mark.parametrize("op", CLASSICAL)
def test_sizes_behind_operators_of_classical_models(op):
    """Behind columns that ArrayFeatureExtractor takes, and for trees behind a value of any rank."""
    first, rank = "ai.onnx.ml.ArrayFeatureExtractor", None
    if op == "TreeEnsembleRegressor":
        first, rank = "Reshape", 2
    text = f"""g (float[n, 4] x, {"int64[k] places, " if rank else ""}float[1] w) => (float[] y) {{
        a = {first}(x, places)  t = ai.onnx.ml.{op}(a)  y = Mul(t, w) }}"""
    model = build(text, 18, {} if rank else {"places": [0, 2, 3]}, '"ai.onnx.ml": 3')
    model.graph.node[1].attribute.extend(helper.make_attribute(*each) for each in CLASSICAL[op].items())
    feeds = {"x": floats(5, 4), "w": floats(1, seed=1)} | ({"places": np.array([-1, 4])} if rank else {})
    expected = computed(model, feeds)[0]
    sizes = Graph(model).sizes("t")
    assert len(sizes) == expected.ndim
    if not rank:
        assert sizes == ["n", expected.shape[1]]
    found = run(gradients(model, "y", ["w"]), feeds)
    np.testing.assert_allclose(found[-1], expected.sum(keepdims=True)[0] / feeds["w"], rtol=1e-4)


WRITTEN = [
    "batch size", "größe", "批", "😀", "a.b/c:d", "p2o.DynamicDimension.0", "N+1", "2*N", "-N", "floor(N/2)", "%s",
    "{", '"',
    "\n", " ", "a" * 300,
    # what looks like a number
    "0", "1", "3", "007", "1e3", "-1", "--1", "+1", "1.0", "0x10", "inf",
    # what stands for no name
    "", "?", "unk__0", "unknown", "None", "null", "nan", "*", "any",
    # names of values of the graph, and of those that are made
    "x", "w", "y", "x_grad", "target", "loss", "0_grad",
]  # fmt: skip
# Everything that is concluded from sizes: shape arithmetic, reshaping, broadcasting, windows without known sizes.
BODY = """
    h = MatMul(x, w)
    c = Conv <kernel_shape = [1, 1]> (h, k)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
    a = AveragePool <kernel_shape = [2, 2], pads = [0, 0, 1, 1]> (c)
    s = Shape(h)
    n = Gather(s, first)
    wanted = Concat <axis = 0> (n, rest)
    flat = Reshape(h, wanted)
    t = ReduceSum <keepdims = 0> (flat)
    u = ReduceSum <keepdims = 0> (p)
    v = ReduceMean <keepdims = 0> (a)
    r = Add(t, u)
    q = Add(r, v)
    z = Mul(h, q)
    y = Add(z, bias)
"""
WEIGHTS = {"w": floats(6, 4), "k": floats(2, 2, 1, 1), "bias": floats(4)}


def model_with(*names):
    """A graph of pictures [.., 2, .., 6] with these names of the first size and of the third."""
    constants = {**WEIGHTS, "first": [0], "rest": [-1, 8]}
    model = build(f"g (float[A, 2, B, 6] x) => (float[A, 2, B, 4] y) {{ {BODY} }}", constants=constants)
    for value in (*model.graph.input, *model.graph.output):
        for axis, name in zip((0, 2), names, strict=True):
            value.type.tensor_type.shape.dim[axis].dim_param = name
    return model


def results(names, x):
    """The gradients in both forms, and the results of the lowered model."""
    plain, other = (gradients(model_with(*names), "y", ["x", *WEIGHTS], plain=plain) for plain in (True, False))
    yield from computed(plain, {"x": x})
    yield from computed(other, {"x": x}, plain=False)
    yield from computed(lower(model_with(*names)), {"x": x})


def pictures():
    return floats(3, 2, 5, 6)


@pytest.fixture(scope="module")
def expected():
    return list(results(("N", "H"), pictures()))


EVERYWHERE = [(name, name) for name in WRITTEN]
ONCE = [pair for name in NAMES for pair in ((name, "H"), ("N", name))]


@pytest.mark.parametrize("names", [*EVERYWHERE, *ONCE], ids=lambda names: repr(names)[:30])
@pytest.mark.one_in(3)
def test_gradients_are_the_same_by_any_name(names, expected):
    """Where one name stands for both sizes, though they differ, and vague ones for one or the other."""
    for found, other in zip(results(names, pictures()), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4)

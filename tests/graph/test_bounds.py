"""Graphs of a few bytes that ask for much are bounded; nodes that no operator takes are named."""

import random
import tracemalloc
from contextlib import suppress

import numpy as np
import onnx
import pytest
from damage import damaged_model
from differences import build, run
from gradient_case import MICROSOFT
from gradient_cases import CASES as OPERATOR_CASES
from gradient_cases import numbers
from onnx import TensorProto, helper, numpy_helper

from opgrad.gradients import gradients
from opgrad.onnx.graph.graph import Graph, evaluate
from opgrad.onnx.graph.loading import check_model
from opgrad.onnxruntime import lower
from opgrad.training.make.trainability import trainability

MOST = 100 << 20  # bytes that Python may take meanwhile; one of these arrays is larger
LENGTH = 2**27
WHOLE, FILLED = {"s": np.array([LENGTH])}, "ConstantOfShape <value = int64[1] {3}>"
# What reads an array of that length, which the graph makes of a shape.
CASES = {
    "a matrix": ("c = ConstantOfShape(s)\n y = Mul(x, c)", {"s": np.array([2**18, 2**18])}),
    "one number, repeated": ("c = Expand(one, s)\n y = Mul(x, c)", {"s": np.array([2**33]), "one": np.float32(1)}),
    "a sum": ("c = ConstantOfShape(s)\n d = Add(c, c)\n y = Mul(x, d)", WHOLE),
    "integers": (f"c = {FILLED}(s)\n d = Add(c, c)\n e = Cast <to = 1> (d)\n y = Mul(x, e)", WHOLE),
    "axes": (f"c = {FILLED}(s)\n d = Unsqueeze(c, zero)\n e = Cast <to = 1> (d)\n y = Mul(x, e)",
             {**WHOLE, "zero": np.array([0])}),
    "joined": (f"c = {FILLED}(s)\n d = Concat <axis = 0> (c, c)\n e = Cast <to = 1> (d)\n y = Mul(x, e)", WHOLE),
    "as a shape": (f"c = {FILLED}(s)\n d = Add(c, c)\n y = Reshape(x, d)", WHOLE),
    "counted": ("c = Range(zero, s, one)\n d = Add(c, c)\n e = Cast <to = 1> (d)\n y = Mul(x, e)",
                {"s": np.array(LENGTH), "zero": np.array(0), "one": np.array(1)}),
    "a size that is computed": ("t = Mul(s, s)\n c = ConstantOfShape(t)\n d = Add(c, c)\n y = Mul(x, d)",
                                {"s": np.array([2**14])}),
    "a size of what is known": ("c = ConstantOfShape(s)\n t = Shape(c)\n u = Mul(t, t)\n d = Expand(one, u)\n"
                                " e = Add(d, d)\n y = Mul(x, e)", {"s": np.array([2**14]), "one": np.float32(1)}),
    "all pairs": ("c = Add(a, b)\n y = Mul(x, c)", {"a": np.zeros((9000, 1), "f"), "b": np.zeros((1, 9000), "f")}),
    "tiles": ("c = Tile(one, s)\n d = Add(c, c)\n y = Mul(x, d)", {**WHOLE, "one": np.ones(1, np.float32)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_large_is_computed(name):
    body, constants = CASES[name]
    model = build(f"g (float[1] x) => (float[] y) {{ {body} }}", constants=constants)
    tracemalloc.start()
    try:
        found = gradients(model, "y", "x", plain=True)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert found.ByteSize() < 1 << 21  # all pairs are made of 72 kB


def test_data_is_not_propagated_through_what_is_long(monkeypatch):
    """onnx writes down each element of what is read as a shape: 200 bytes, for 2**27 of them."""
    seen = []

    def infer_shapes(model, *args, **options):
        lengths = {}
        for value in (*model.graph.input, *model.graph.initializer):
            sizes = value.dims if isinstance(value, onnx.TensorProto) else [
                dim.dim_value for dim in value.type.tensor_type.shape.dim
            ]  # fmt: skip
            lengths[value.name] = list(sizes)
        if options.get("data_prop"):
            reads = [name for node in model.graph.node if node.op_type == "Add" for name in node.input]
            seen.extend(lengths.get(name, [0])[0] for name in reads)
        return original(model, *args, **options)

    original = onnx.shape_inference.infer_shapes
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", infer_shapes)
    model = build("g (float[70000] x, float[70000] b) => (float[70000] y) { y = Add(x, b) }")
    assert Graph(model).sizes("y") == [70000]
    assert seen == [0, 0]


def test_sizes_of_what_is_long_are_known():
    text = """g (float[N, 70000] x, float[70000] b, float[3, 70000] m) => (float y) {
        s = Add(x, b)  c = Concat <axis = 0> (b, b)  t = Shape(b)  r = Reshape(m, t2)  y = Mul(s, b) }"""
    known = Graph(build(text, constants={"t2": [-1]}))
    assert known.sizes("s") == ["N", 70000]
    assert known.sizes("c") == [140000]
    assert known.sizes("r") == [210000]
    assert known.constant("t").tolist() == [70000]


def test_what_is_small_is_computed():
    node = onnx.helper.make_node("Expand", ["x", "s"], ["y"])
    inputs = [np.ones(1, np.float32), np.array([1000])]
    assert evaluate(node, inputs, 17, 4000)[0].shape == (1000,)
    assert evaluate(node, inputs, 17, 3999) is None
    assert evaluate(node, [inputs[0], np.array([-3])], 17, 4000) is None


def test_shapes_beyond_memory_are_shapes():
    known = Graph(build(f"g (float[{2**40}, {2**40}] x) => (float y) {{ s = Shape(x)  z = Size(x)  y = Mul(x, x) }}"))
    assert known.constant("s").tolist() == [2**40, 2**40]
    assert known.constant("z") is None


def test_results_are_as_before():
    text = "g (float[4] x) => (float[4] y) { c = Expand(one, s)\n d = Mul(c, two)\n y = Mul(x, d) }"
    model = build(text, constants={"one": np.float32(1), "s": [4], "two": np.float32(2)})
    found = gradients(model, "y", "x", plain=True)
    assert [node.op_type for node in found.graph.node].count("Expand") == 0
    np.testing.assert_allclose(run(found, {"x": numbers(4).astype(np.float32)})[1], 2)


REFUSED = (ValueError, NotImplementedError)
DAMAGED = 30  # models, of some milliseconds each


def made(op, *shapes, domain="", opset=21, outputs=1, **attributes):
    """A model of one node, whose inputs are float32; None for an input without a name."""
    names = [f"x{place}" if shape is not None else "" for place, shape in enumerate(shapes)]
    results = [f"y{place}" for place in range(outputs)]
    node = helper.make_node(op, names, results, "n", domain=domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in zip(names, shapes, strict=True)
        if name
    ]
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y0")])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (made("Relu", [2], [2]), "2 inputs, expected at most 1"),
        (made("Gemm", [2, 2]), "1 inputs, expected at least 2"),
        (made("MatMul", [2, 2], None), "no input 1"),
        (made("Concat", [2], [2]), "no attribute 'axis'"),
        (made("Softmax", [2], axis=[0]), "an attribute 'axis' of type INTS, expected INT"),
        (made("Softmax", [2], outputs=2), "2 outputs, expected at most 1"),
    ],
)
def test_what_onnx_declares_of_an_operator_holds(model, fault):
    with pytest.raises(ValueError, match=rf"the node 'n' \({model.graph.node[0].op_type}\) has {fault}"):
        gradients(model, "y0", "x0")


def test_the_bodies_of_loops_and_functions_are_checked():
    branch = helper.make_graph(made("Relu").graph.node, "b", [], [onnx.ValueInfoProto(name="y0")])
    model = made("If", [], then_branch=branch, else_branch=branch)
    with pytest.raises(ValueError, match=r"the node 'n' \(Relu\) has 0 inputs"):
        check_model(model, "it")
    own = made("Own", [2], domain="own")
    own.functions.append(
        helper.make_function("own", "Own", ["x"], ["y"], made("Relu").graph.node, [helper.make_opsetid("", 21)])
    )
    with pytest.raises(ValueError, match=r"the node 'n' \(Relu\) has 0 inputs"):
        check_model(own, "it")


# Operators of com.microsoft, which ONNX does not declare, and values that a declaration does not tell.
FOUND = [
    made("Inverse", domain=MICROSOFT),
    made("FusedMatMul", [3], [3], domain=MICROSOFT),
    made("FusedMatMul", [2, 3], [3, 2], domain=MICROSOFT, transA="x"),
    made("GroupQueryAttention", [1, 2, 8], [1, 2, 8], [1, 2, 8], domain=MICROSOFT),
    made("MultiHeadAttention", [1, 2, 8], [1, 2, 8], [1, 2, 8], domain=MICROSOFT),
    made("MatMulBnb4", [2, 3], [6], [1], domain=MICROSOFT, K=3, N=2),
    made("Attention", [1, 2, 8], [8], domain=MICROSOFT, num_heads=0),
    made("UnfoldTensor", [2, 3], domain=MICROSOFT),
    made("GRU", [2, 3], [1, 6, 2], [1, 6, 2], hidden_size=2),
    made("Slice", [2, 3], opset=9, axes=[2], starts=[0], ends=[1]),
    made("ReduceProd", [2, 3], opset=11, axes=[7]),
]


@pytest.mark.parametrize("model", FOUND, ids=[each.graph.node[0].op_type for each in FOUND])
def test_damage_that_no_declaration_tells_is_refused(model):
    for act in (lambda each: gradients(each, "y0", "x0"), lower, trained):
        with suppress(*REFUSED):
            act(model)


def trained(model):
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    copy.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "x0"))
    return trainability(copy)


def test_seeded_damage_to_every_kind_of_node_is_refused():
    for seed in range(DAMAGED):
        chance = random.Random(seed)
        content = damaged_model(chance.choice(OPERATOR_CASES).model().SerializeToString(), chance)
        with suppress(*REFUSED):
            gradients(content, "y0", "x0", plain=seed % 2 == 0)

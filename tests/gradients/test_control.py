"""Branches that are known are inlined; what has no gradient is refused by name, with the reason."""

import numpy as np
import pytest
from differences import build, run
from onnx import TensorProto, helper, numpy_helper

from opgrad.gradients import gradients


def branching(condition):
    """A model with an If, whose condition is a constant or an input."""
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, ["x"], [f"{name}_result"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_result", TensorProto.FLOAT, [3])],
        )
        for name, op in (("then_branch", "Exp"), ("else_branch", "Neg"))
    }
    graph = helper.make_graph(
        [helper.make_node("If", ["condition"], ["y"], "choice", **branches)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    if condition is None:
        graph.input.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, []))
    else:
        graph.initializer.append(numpy_helper.from_array(np.array(condition), "condition"))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("condition", "expected"), [(True, np.exp), (False, lambda x: -np.ones_like(x))])
def test_a_branch_that_is_known_is_inlined(condition, expected):
    x = np.array([0.5, -1, 2], np.float32)
    found = run(gradients(branching(condition), "y", "x", plain=True), {"x": x})[1]
    np.testing.assert_allclose(found, expected(x), rtol=1e-6)


def test_a_branch_that_is_not_known_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"one node has no gradient: If \(node 'choice'\): which branch"):
        gradients(branching(None), "y", "x")


@pytest.mark.parametrize(
    ("operator", "reason"), [("Loop", "how often it runs"), ("Scan", "its steps have no gradient")]
)
def test_loops_are_refused_by_name(operator, reason):
    """Also where what is differentiated reaches them from outside, as a value that their bodies read."""
    state = helper.make_tensor_value_info("s", TensorProto.FLOAT, [3])
    nodes = [helper.make_node("Add", ["s", "x"], ["t"])]
    results = [helper.make_tensor_value_info("t", TensorProto.FLOAT, [3])]
    if operator == "Loop":
        given = [
            helper.make_tensor_value_info(*each) for each in (("i", TensorProto.INT64, []), ("c", TensorProto.BOOL, []))
        ]
        nodes.append(helper.make_node("Identity", ["c"], ["d"]))
        results.insert(0, helper.make_tensor_value_info("d", TensorProto.BOOL, []))
        inputs, extra = ["count", "", "zeros"], {}
    else:
        given, inputs, extra = [], ["zeros", "rows"], {"num_scan_inputs": 1}
        state = [state, helper.make_tensor_value_info("row", TensorProto.FLOAT, [3])]
    state = state if isinstance(state, list) else [state]
    body = helper.make_graph(nodes, "body", [*given, *state], results)
    node = helper.make_node(operator, inputs, ["y"], "again", body=body, **extra)
    model = build("g (float[3] x, int64 count, float[3] zeros, float[4, 3] rows) => (float[3] y) { y = Neg(x) }")
    model.graph.node[0].CopyFrom(node)
    with pytest.raises(NotImplementedError, match=rf"one node has no gradient: {operator} \(node 'again'\): {reason}"):
        gradients(model, "y", "x")


def test_all_nodes_without_a_rule_are_named_at_once():
    model = build("g (float[3, 3] x) => (float y) { a = my.One(x)\n b = Det(a)\n c = Exp(b)\n y = my.Two(c) }")
    with pytest.raises(
        NotImplementedError, match=r"3 nodes have no gradient: my\.One.*; Det.*; my\.Two.*register_grad"
    ):
        gradients(model, "y", "x")


def test_nodes_without_a_rule_are_told_with_those_whose_rule_refuses_them():
    """Also those that stand before a node without a rule, or before one with a graph of its own."""
    model = build(
        """g (float[3, 3] x, bool c) => (float y) {
            a = Einsum <equation = "ij,jk->ik"> (x)  b = my.One(a)
            d = If (c) <then_branch = t () => (float[3, 3] p) { p = Exp(b) },
                        else_branch = e () => (float[3, 3] q) { q = Identity(b) }>
            y = Det(d)
        }"""
    )
    reason = r"4 nodes have no gradient: Einsum .*; my\.One .*there is no rule.*; If .*which branch.*; Det "
    with pytest.raises(NotImplementedError, match=reason):
        gradients(model, "y", "x")


def test_all_reasons_of_rules_are_told_at_once():
    model = build(
        """g (float[3, 3] x, float[1, 12, 3] w, float[1, 12, 3] r) => (float[1] y) {
            a = Einsum <equation = "ij,jk->ik"> (x)
            b = LSTM <hidden_size = 3, clip = 1.0> (a, w, r)
            y = ReduceSum(b)
        }"""
    )
    with pytest.raises(NotImplementedError, match=r"2 nodes .*has 2 operands, the node 1.*attribute clip is 1\.0"):
        gradients(model, "y", "x")


def test_what_is_trained_is_no_constant():
    model = build("g (float[3] x) => (float[3] y) { y = Pow(x, exponent) }")
    model.graph.initializer.append(numpy_helper.from_array(np.float32(2), "exponent"))
    x = np.array([1, 2, 3], np.float32)
    _, dx, exponent = run(gradients(model, "y", ["x", "exponent"], plain=True), {"x": x})
    np.testing.assert_allclose(dx, 2 * x)
    np.testing.assert_allclose(exponent, (x**2 * np.log(x)).sum(), rtol=1e-6)


def test_a_composition_that_has_no_gradient_tells_why():
    text = 'y = com.microsoft.FusedGemm <activation = "Sin"> (x, x)'
    with pytest.raises(NotImplementedError, match=r"FusedGemm .*: its activation is 'Sin', expected one of , Clip"):
        gradients(build(f"g (float[3, 3] x) => (float[3, 3] y) {{ {text} }}"), "y", "x")

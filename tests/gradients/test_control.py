"""Branches: those that are known are inlined. What has no gradient is refused by name, with the reason."""

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


def test_gradients_of_a_branch_that_is_not_known():
    x = np.array([0.5, -1, 2], np.float32)
    model = gradients(branching(None), "y", "x", plain=True)
    for condition, expected in ((True, np.exp(x)), (False, -np.ones_like(x))):
        np.testing.assert_allclose(run(model, {"x": x, "condition": np.array(condition)})[1], expected, rtol=1e-6)


def test_what_a_body_has_no_gradient_for_is_told_by_name():
    model = build(
        """g (float[3, 3] x, int64 n, bool t) => (float[3, 3] y) {
            [again] y = Loop (n, t, x) <body = b (int64 i, bool c, float[3, 3] s) => (bool d, float[3, 3] r) {
                d = Identity(c) [one] o = my.One(s) two = Exp(o) [three] r = my.Two(two)
            }>
        }"""
    )
    reason = (
        r"one node has no gradient: Loop \(node 'again'\): in its body, my.One \(node 'one'\): there is no rule "
        r"for it; [^;]*; my.Two \(node 'three'\): there is no rule"
    )
    with pytest.raises(NotImplementedError, match=reason):
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
                        else_branch = e () => (float[3, 3] q) { q = my.Two(b) }>
            y = my.Three(d)
        }"""
    )
    reason = (
        r"4 nodes have no gradient: Einsum .*; my\.One .*there is no rule.*; If .*in its body, my.Two.*; my\.Three "
    )
    with pytest.raises(NotImplementedError, match=reason):
        gradients(model, "y", "x")


def test_all_reasons_of_rules_are_told_at_once():
    model = build(
        """g (float[3, 3] x, float[1, 12, 3] w, float[1, 12, 3] r) => (float[1] y) {
            a = Einsum <equation = "ij,jk->ik"> (x)
            b = LSTM <hidden_size = 3, clip = -1.0> (a, w, r)
            y = ReduceSum(b)
        }"""
    )
    with pytest.raises(NotImplementedError, match=r"2 nodes .*has 2 operands, the node 1.*attribute clip is -1\.0"):
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
    with pytest.raises(NotImplementedError, match=r"its activation is 'Sin', expected none or one of Relu, "):
        gradients(build(f"g (float[3, 3] x) => (float[3, 3] y) {{ {text} }}"), "y", "x")

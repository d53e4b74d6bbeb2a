"""Models as onnxruntime's optimizer of transformers leaves them: with operators that onnx knows nothing of."""

import numpy as np
import pytest
from differences import build, computed, slope_in_onnxruntime
from gradient_cases import numbers
from onnx import TensorProto, helper, numpy_helper

from opgrad.gradients import gradients
from opgrad.onnx.graph.facts import FACTS
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.inference import WRITTEN
from opgrad.onnx.rules.coverage import zero
from opgrad.onnx.rules.node import RULES
from opgrad.onnxruntime.loading import NATIVE, operators

BERT = """bert (int64[batch, seq] ids, int64[batch, seq] segments, int64[batch, seq] mask) => (float[] y) {
    m = Cast <to = 6> (mask)\n i = Cast <to = 6> (ids)\n s = Cast <to = 6> (segments)
    e, lengths = com.microsoft.EmbedLayerNormalization (i, s, word, position, segment, gamma, beta, m)
    a0 = com.microsoft.Attention <num_heads = 2> (e, qkv, bias3, lengths)
    b0 = MatMul(a0, square)
    c0 = com.microsoft.SkipLayerNormalization (b0, e, gamma, beta, bias)
    d0 = MatMul(c0, up)\n f0 = com.microsoft.BiasGelu (d0, bias2)\n g0 = MatMul(f0, down)
    h0 = com.microsoft.SkipLayerNormalization (g0, c0, gamma, beta, bias)
    a1 = com.microsoft.Attention <num_heads = 2> (h0, qkv, bias3, lengths)
    b1 = com.microsoft.FusedMatMul <alpha = 0.5, transB = 1> (a1, square)
    y = com.microsoft.SkipLayerNormalization (b1, h0, gamma, beta, bias)
}"""
WEIGHTS = {
    "word": (10, 8), "position": (6, 8), "segment": (2, 8), "gamma": (8,), "beta": (8,), "qkv": (8, 24), "bias3": (24,),
    "square": (8, 8), "bias": (8,), "up": (8, 16), "bias2": (16,), "down": (16, 8),
}  # fmt: skip
FEEDS = {
    "ids": np.array([[1, 2, 3, 4], [5, 6, 0, 0]]), "segments": np.array([[0, 0, 1, 1], [0, 0, 0, 0]]),
    "mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]]),
}  # fmt: skip


def bert():
    """A model of two layers."""
    values = (0.4 * numbers(*shape, seed=number).astype(np.float32) for number, shape in enumerate(WEIGHTS.values()))
    return build(BERT, constants=dict(zip(WEIGHTS, values, strict=True)))


def test_shapes_are_known_through_all_of_it():
    known = Graph(bert())
    for name in ("e", "a0", "b0", "c0", "g0", "h0", "a1", "b1", "y"):
        assert list(known.sizes(name)) == ["batch", "seq", 8], name
        assert known.element_type(name) == TensorProto.FLOAT
    assert list(known.sizes("lengths")) == ["batch"]
    assert known.element_type("lengths") == TensorProto.INT32


@pytest.mark.parametrize("wanted", [["square"], ["down", "bias2"], ["word", "qkv", "gamma"]])
def test_every_part_of_it_has_gradients(wanted):
    """Also behind layers that nothing is asked of, whose operators stay as they are."""
    model = bert()
    expected = computed(model, FEEDS)[0]
    factor = numbers(*expected.shape).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(factor, "factor"))
    model.graph.node.append(helper.make_node("Mul", ["y", "factor"], ["weighted"]))
    made = [gradients(model, "weighted", wanted, plain=plain) for plain in (True, False)]
    found = [computed(each, FEEDS, plain=False) for each in made]
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[0][0], expected, rtol=1e-4, atol=1e-5)
    for name, gradient in zip(wanted, found[0][1:], strict=True):
        direction = np.random.default_rng(0).normal(size=gradient.shape).astype(np.float32)
        slope = slope_in_onnxruntime(model, name, direction, 4e-3, lambda each: computed(each, FEEDS)[0], factor)
        assert slope == pytest.approx((gradient * direction).sum(), rel=2e-2, abs=2e-2)


def test_onnxruntime_runs_every_operator_of_it():
    assert {each.runner for each in operators(bert())} == {NATIVE}


def test_an_operator_that_nobody_runs_does_not_make_others_so():
    text = "g (int64[N] ids) => (float[] y) { e = my.Odd(ids, table)\n y = MatMul(e, w) }"
    model = build(text, constants=dict.fromkeys(("table", "w"), np.ones((3, 3), np.float32)))
    assert {each.name: each.runner for each in operators(model)} == {"Odd": "nobody", "MatMul": NATIVE}


# --- each operator, against what onnxruntime makes ---

X, HEADS = (2, 5, 8), "num_heads = 2"
# Attributes, shapes of the inputs (None: left out), and how many results are looked at.
CASES = {
    "Attention": (HEADS, [X, (8, 24), (24,)], 2),
    "Attention, sizes": (f"{HEADS}, qkv_hidden_sizes = [8, 8, 4]", [X, (8, 20), (20,)], 1),
    "Attention, past": (HEADS, [X, (8, 24), (24,), None, (2, 2, 2, 3, 4)], 2),
    "MultiHeadAttention": (HEADS, [X, (2, 7, 8), (2, 7, 4)], 3),
    "FusedMatMul": ("transA = 1", [(2, 8, 5), (8, 3)], 1),
    "FusedMatMul, right": ("transB = 1", [(2, 5, 8), (3, 8)], 1),
    "FusedGemm": ('transB = 1, activation = "Relu"', [(5, 8), (3, 8), (3,)], 1),
    "FusedConv": ('kernel_shape = [3, 3], activation = "Relu"', [(1, 2, 8, 8), (4, 2, 3, 3)], 1),
    "SkipLayerNormalization": ("", [X, X, (8,), (8,), (8,)], 1),
    "SkipSimplifiedLayerNormalization": ("", [X, X, (8,)], 1),
    "BiasGelu": ("", [X, (8,)], 1), "FastGelu": ("", [X], 1), "QuickGelu": ("", [X], 1), "Gelu": ("", [X], 1),
    "ScaledSiLU": ("", [X], 1), "GatedAdd": ("", [X, X, (2, 5, 1)], 1), "GatedRMSNorm": ("", [X, (4,), X], 1),
    "MoE": ("k = 2", [X, (10, 4), (4, 6, 8), (4, 6), (4, 8, 6)], 1),
    "TransposeMatMul": ("transA = 1", [(2, 8, 5), (2, 8, 3)], 1),
}  # fmt: skip


def test_keys_and_values_in_one_array():
    """Which onnxruntime has on GPUs alone."""
    for given, call in (("float[N, 5, 2, 3, 4] q", "q"), ("float[N, 5, 8] q, float[N, 7, 2, 2, 4] k", "q, k")):
        body = f"y = com.microsoft.MultiHeadAttention <num_heads = 2> ({call})"
        assert list(Graph(build(f"g ({given}) => (float[] y) {{ {body} }}")).sizes("y")) == ["N", 5, 8]


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_of_onnxruntime(name):
    attributes, shapes, count = CASES[name]
    names = ["" if shape is None else f"x{place}" for place, shape in enumerate(shapes)]
    given = ", ".join(f"float{list(shape)} x{place}" for place, shape in enumerate(shapes) if shape is not None)
    results = [f"y{place}" for place in range(count)]
    op = f"com.microsoft.{name.partition(',')[0]}"
    call = f"{', '.join(results)} = {op} {f'<{attributes}>' * bool(attributes)} ({', '.join(names)})"
    model = build(f"g ({given}) => ({', '.join(f'float[] {each}' for each in results)}) {{ {call} }}")
    feeds = {f"x{place}": np.ones(shape, np.float32) for place, shape in enumerate(shapes) if shape is not None}
    known = Graph(model)
    for result, array in zip(results, computed(model, feeds), strict=True):
        assert list(known.sizes(result)) == list(array.shape), result


def test_there_are_facts_of_every_operator_with_a_rule_outside_of_onnx():
    """Its shape: a row of FACTS, or a function that writes it."""
    losses = {"SoftmaxCrossEntropy", "SparseSoftmaxCrossEntropy"}  # one number, or a shape that nobody asks for
    ruled = {key for key, declared in RULES.items() if key[0] and declared.rule is not zero}
    shaped = {key for key, facts in FACTS.items() if facts.like or facts.becomes}
    assert {op for _, op in ruled - shaped} - WRITTEN.keys() - losses == set()
    assert not {op for _, op in shaped} & WRITTEN.keys()

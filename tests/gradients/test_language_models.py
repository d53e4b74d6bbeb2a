"""A language model as builders for onnxruntime write it: packed weights, grouped attention, fused normalizations."""

import numpy as np
import pytest
from differences import build, slope_in_onnxruntime
from gradient_cases import numbers
from onnx import helper, numpy_helper
from runtime_cases import session_of
from runtime_cases_packed import packed

from opgrad.gradients import gradients
from opgrad.onnx.graph.graph import Graph
from opgrad.onnxruntime import lower

WIDTH, VOCABULARY, BLOCK = 64, 20, 16
LAYER = """
    qkv{0} = com.microsoft.MatMulNBits <K = 64, N = 128, bits = 4, block_size = 16> (n{0}, q_b, q_s)
    a{0}, pk{0}, pv{0} = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, do_rotary = 1,
        local_window_size = 3, softcap = 20.0> (qkv{0}, , , , , lengths, total, cos, sin)
    o{0} = com.microsoft.MatMulNBits <K = 64, N = 64, bits = 4, block_size = 16> (a{0}, o_b, o_s)
    m{0}, , , r{1} = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (r{0}, o{0}, norm_b)
    up{0} = com.microsoft.MatMulNBits <K = 64, N = 64, bits = 4, block_size = 16> (m{0}, o_b, o_s)
    ug{0} = com.microsoft.QuickGelu <alpha = 1.0> (up{0})
    d{0} = com.microsoft.MatMulNBits <K = 64, N = 64, bits = 4, block_size = 16> (ug{0}, o_b, o_s)
    n{1}, , , z{0} = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (r{1}, d{0}, norm_a)
"""
MODEL = """decoder (int64[batch, tokens] ids, int32[batch] lengths, int32 total) => (float[batch, tokens, 20] logits) {
    r0 = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 16, quantize_axis = 1> (table, ids, table_s)
    n0 = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-5, stash_type = 1> (r0, norm_a)
""" + LAYER.format(0, 1) + LAYER.format(1, 2) + """
    logits = com.microsoft.MatMulNBits <K = 64, N = 20, bits = 4, block_size = 16> (n2, head_b, head_s)
}"""  # fmt: skip
FEEDS = {
    "ids": np.array([[1, 4, 7, 2, 9], [0, 3, 3, 8, 19]]), "lengths": np.array([4, 4], np.int32),
    "total": np.array(5, np.int32),
}  # fmt: skip


def decoder():
    """A decoder of two layers with random weights."""
    random, given = np.random.default_rng(0), {}
    for name, rows in {"q": 128, "o": 64, "head": VOCABULARY, "table": VOCABULARY}.items():
        whole = random.integers(0, 16, (rows, WIDTH // BLOCK, BLOCK))
        scales = random.uniform(0.01, 0.03, (rows, WIDTH // BLOCK)).astype(np.float32)
        given |= {f"{name}_b": packed(whole, 4), f"{name}_s": scales}
    given["table"] = given.pop("table_b").reshape(VOCABULARY, -1)
    given |= {name: random.uniform(0.5, 1.5, WIDTH).astype(np.float32) for name in ("norm_a", "norm_b")}
    angles = np.outer(np.arange(16), 1 / 10 ** np.arange(8)).astype(np.float32)
    given |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    model = build(MODEL, 21, given)
    model.ir_version = 10
    return model


def test_shapes_are_known_through_all_of_it():
    known = Graph(decoder())
    for name in ("r0", "n0", "a0", "o0", "m0", "n1", "a1", "n2"):
        assert list(known.sizes(name)) == ["batch", "tokens", WIDTH], name


@pytest.mark.parametrize("name", ["norm_a", "norm_b", "q_s", "table_s"])
def test_gradients_are_those_of_differences_in_onnxruntime(name):
    model = decoder()
    factor = numbers(2, 5, VOCABULARY).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(factor, "factor"))
    model.graph.node.append(helper.make_node("Mul", ["logits", "factor"], ["weighted"]))
    found = gradients(model, "weighted", name)
    assert found.SerializeToString() == gradients(model, "weighted", name).SerializeToString()
    assert {"MatMulNBits", "GroupQueryAttention"} <= {node.op_type for node in found.graph.node}
    gradient = session_of(lower(found)).run([f"{name}_grad"], FEEDS)[0]
    value = numpy_helper.to_array(next(each for each in model.graph.initializer if each.name == name))
    direction = gradient / np.linalg.norm(gradient)
    step = 1e-2 * np.linalg.norm(value) / np.sqrt(value.size)
    slope = slope_in_onnxruntime(model, name, direction, step, lambda m: session_of(m).run(None, FEEDS)[0], factor)
    assert slope == pytest.approx((gradient * direction).sum(), rel=2e-2)

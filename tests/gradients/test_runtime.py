"""Gradients against onnxruntime's own results, and of its own operators against formulas in PyTorch."""

import numpy as np
import onnxruntime
import pytest
import runtime_cases_attention
import runtime_cases_fused
import runtime_cases_newer
import runtime_cases_packed
import runtime_cases_regions
from differences import computed, in_float32, with_constants, with_types
from differences import run as reference_run
from gradient_case import Case, floats
from gradient_cases import CASES, OF_RUNTIME, numbers
from onnx import TensorProto, helper
from passes_cases import build
from runtime_cases import check, check_in_bfloat16, exact_options

from opgrad.gradients import gradients


def run(model, feeds):
    """The results of a model in stock onnxruntime."""
    return computed(with_types(model), feeds)


# --- recurrent layers ---

EMPTY = [case for case in CASES if case.form == "a length of 0"]


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_sequences_without_steps_have_states_of_zeros(case):
    """Whatever their initial states are, which so have no gradient; the reference evaluator says the same."""
    model = in_float32(case.model())
    results = list(model.graph.node[0].output)
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results[1:])
    feeds = {name: each.astype(np.float32) if each.dtype == np.float64 else each for name, each in case.feeds.items()}
    for ours, theirs in zip(reference_run(model, feeds), run(model, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert not theirs[..., 0, :].any()
    wanted = [f"x{place}" for place in case.wanted]
    found = run(gradients(model, results, wanted, plain=True), feeds)[len(results) :]
    for name, gradient in zip(wanted, found, strict=True):
        direction = np.random.default_rng(0).standard_normal(gradient.shape).astype(np.float32)
        ends = [
            sum(each.sum(dtype=np.float64) for each in run(model, feeds | {name: feeds[name] + step * direction}))
            for step in (1e-2, -1e-2)
        ]
        np.testing.assert_allclose((gradient * direction).sum(), (ends[0] - ends[1]) / 2e-2, rtol=2e-2, atol=2e-3)
    for gradient in found[wanted.index("x5") :]:
        assert not gradient[:, 0].any()
        assert gradient[:, 1].any()


OWN_NUMBERS = [
    case for case in CASES
    if case.op in ("RNN", "GRU", "LSTM") and ("activations" in case.form or "clip" in case.form) and case.opset < 22
]  # fmt: skip


@pytest.mark.parametrize("case", OWN_NUMBERS, ids=str)
@pytest.mark.one_in(2)
def test_activations_and_clipping_are_those_of_onnxruntime(case):
    model, wanted = in_float32(case.model()), [f"x{place}" for place in case.wanted]
    feeds = {name: each.astype(np.float32) if each.dtype == np.float64 else each for name, each in case.feeds.items()}
    np.testing.assert_allclose(reference_run(model, feeds)[0], run(model, feeds)[0], rtol=1e-4, atol=1e-5)
    graph = gradients(model, [model.graph.node[0].output[0]], wanted, plain=True)
    for ours, theirs in zip(run(graph, feeds), reference_run(graph, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


REFUSED = {
    "clip": ({"clip": -1.0}, "its attribute clip is -1.0, expected a number above 0"),
    "name": ({"activations": ["Tanh", "Sine"]}, r"its activations are .*'Sine'.*, expected 2 of .*, HardSigmoid"),
    "count": ({"activations": ["Tanh"]}, r"its activations are \['Tanh'\], expected 2 of Sigmoid, .*"),
}


@pytest.mark.parametrize(("attributes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_recurrent_layer_computes_is_refused(attributes, message):
    case = next(case for case in CASES if case.op == "GRU" and case.opset == 14)
    model = case.model()
    model.graph.node[0].attribute.extend(helper.make_attribute(*each) for each in attributes.items())
    with pytest.raises(NotImplementedError, match=message):
        gradients(model, [model.graph.node[0].output[0]], ["x0"])


# --- resizing ---

FOR_NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "tf_half_pixel_for_nn"}
RESIZED = [case for case in CASES if case.op in ("Resize", "Upsample") and case.arrays[0].ndim == 4]
RESIZED.append(Case("Resize", 11, (RESIZED[0].arrays[0], floats(), floats(1, 1, 2.5, 1.6)), FOR_NEAREST, form="tf"))


@pytest.mark.parametrize("case", RESIZED, ids=str)
@pytest.mark.one_in(2)
def test_resizing_has_the_gradient_of_what_onnxruntime_does(case):
    """Also where the graph tells no sizes; the operator is linear, so its results for unit vectors tell all of it."""
    model = in_float32(case.model())
    with_constants(model, case.feeds, ["x0"])
    x = case.arrays[0].astype(np.float32)
    forward = onnxruntime.InferenceSession(with_types(model).SerializeToString(), exact_options())
    units = np.eye(x.size, dtype=np.float32).reshape(-1, *x.shape)
    results = np.stack([forward.run(None, {"x0": unit})[0] for unit in units])
    dy = numbers(*results.shape[1:], seed=4).astype(np.float32)
    model.graph.node.append(helper.make_node("Mul", ["y0", "dy"], ["z"]))
    model.graph.input.append(helper.make_tensor_value_info("dy", TensorProto.FLOAT, dy.shape))
    check_resized(model, x, dy, results)
    for axis, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
        dim.dim_param = f"d{axis}"
    check_resized(model, x, dy, results, "keep_aspect_ratio_policy" not in case.attributes)


def check_resized(model, x, dy, results, lowered=True):
    """By ResizeGrad, and by what it is lowered to."""
    expected = (results * dy).reshape(len(results), -1).sum(1).reshape(x.shape)
    native = computed(gradients(model, "z", "x0"), {"x0": x, "dy": dy}, plain=False)[-1]
    np.testing.assert_allclose(native, expected, rtol=1e-4, atol=1e-5)
    if lowered:
        plain = run(gradients(model, "z", "x0", plain=True), {"x0": x, "dy": dy})[-1]
        np.testing.assert_allclose(plain, expected, rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(NotImplementedError, match="it needs sizes that the graph tells"):
            gradients(model, "z", "x0", plain=True)


# --- operators of com.microsoft ---

SAME = {
    "SparseSoftmaxCrossEntropy": (
        "m = Reshape(x, rows) y, p = SparseSoftmaxCrossEntropy(m, labels)",
        "m = Reshape(x, rows) y, p = SoftmaxCrossEntropyLoss(m, labels)",
    ),
    "FakeQuant": (
        "y, mask = com.microsoft.FakeQuant <quant_min = -128, quant_max = 127> (x, scale, zero)",
        "q = QuantizeLinear(x, scale, whole) y = DequantizeLinear(q, scale, whole)",
    ),
    "GRUTraining": (
        "y, h, gates = com.microsoft.GRUTraining <hidden_size = 3, linear_before_reset = 1> (x, w3, r3, b3, , h0)",
        "y, h = GRU <hidden_size = 3, linear_before_reset = 1> (x, w3, r3, b3, , h0)",
    ),
    "LSTMTraining": (
        "y, h, c, all, gates = com.microsoft.LSTMTraining <hidden_size = 3> (x, w4, r4, b4)",
        "y, h, c = LSTM <hidden_size = 3> (x, w4, r4, b4)",
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_operators_have_the_gradients_of_others_that_do_the_same(name):
    constants = {"scale": np.float32(0.01), "zero": np.float32(0), "whole": np.int8(0)}
    constants |= {"image": np.array([1, 1, 5, 8]), "end": np.array([0, 0, 0, 0, 0, 0, 1, 1])}
    constants |= {"rows": np.array([-1, 4]), "labels": np.arange(10) % 4}
    for gates in (3, 4):
        shapes = {f"w{gates}": (1, 3 * gates, 2), f"r{gates}": (1, 3 * gates, 3), f"b{gates}": (1, 6 * gates)}
        constants |= {key: numbers(*shape).astype(np.float32) for key, shape in shapes.items()}
    constants["h0"] = numbers(1, 4, 3).astype(np.float32)
    x = numbers(5, 4, 2).astype(np.float32)
    found = []
    for text in SAME[name]:
        model = build(f"g (float[5, 4, 2] x) => (float z) {{ {text} s = Mul(y, y) z = ReduceSum(s) }}", constants, 18)
        found.append(run(gradients(model, "z", "x", plain=True), {"x": x}))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [3, 2])
def test_packed_projections_have_the_gradients_of_those_in_them(packed):
    values = [numbers(2, 3, 2, 4, seed=seed).astype(np.float32) for seed in range(3)]
    bias, attention = numbers(24).astype(np.float32), "y = com.microsoft.MultiHeadAttention <num_heads = 2>"
    q, k, v = (each.reshape(2, 3, 8) for each in values)
    together = np.stack(values[-packed:], 3)
    whole = f"float[2, 3, 2, {packed}, 4] p"
    texts = {
        "p": (f"g ({whole}, float[2, 3, 8] q)", f"{attention} ({'p, , ' if packed == 3 else 'q, p, '}, bias)"),
        "all": ("g (float[2, 3, 8] q, float[2, 3, 8] k, float[2, 3, 8] v)", f"{attention} (q, k, v, bias)"),
    }
    feeds = {"p": {"p": together, "q": q}, "all": {"q": q, "k": k, "v": v}}
    wanted = {"p": ["p"], "all": ["q", "k", "v"][-packed:]}
    found = {}
    for name, (head, node) in texts.items():
        model = build(f"{head} => (float z) {{ {node} s = Mul(y, y) z = ReduceSum(s) }}", {"bias": bias})
        found[name] = run(gradients(model, "z", wanted[name], plain=True), feeds[name])
    np.testing.assert_allclose(found["p"][0], found["all"][0], rtol=1e-5)
    theirs = np.stack([each.reshape(2, 3, 2, 4) for each in found["all"][1:]], 3)
    np.testing.assert_allclose(found["p"][1], theirs, rtol=1e-4, atol=1e-5)


FORMULAS = {
    **runtime_cases_packed.CASES,
    **runtime_cases_attention.CASES,
    **runtime_cases_fused.CASES,
    **runtime_cases_newer.CASES,
    **runtime_cases_regions.CASES,
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.one_in(3)
def test_gradients_are_those_of_pytorch(name):
    check(FORMULAS[name])


def test_every_operator_of_the_list_is_checked():
    assert {(case.domain, case.op) for case in FORMULAS.values()} == set(OF_RUNTIME)


# The operators that onnxruntime computes in bfloat16, by their cases in float16.
IN_BFLOAT16 = ("ScaledSiLU", "GatedRMSNorm", "LinearAttentionGate")


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_in_bfloat16_sums_are_float32(name):
    """Each gradient is rounded to bfloat16 once, against float64 on the same rounded inputs."""
    check_in_bfloat16(FORMULAS[f"{name}, float16"])

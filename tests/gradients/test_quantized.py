"""Gradients of quantized tensors: straight through the rounding, and through whatever moves the integers."""

import numpy as np
import onnx
import pytest
from differences import build, computed, run
from gradient_cases import numbers
from onnx import TensorProto

from opgrad.gradients import gradients, register_gradient
from opgrad.onnx.rules.node import RULES

RANDOM = np.random.default_rng(7)
CONSTANTS = {
    "scale": np.float32(2**-4), "zero": np.int8(0), "shape": np.array([2, 3, 4, 2]), "places": np.array([3, 0, 2]),
    "one": np.array([1]), "two": np.array([2]), "ten": np.array([9]), "axes": np.array([0]), "halves": np.array([2, 2]),
    "wide": np.array([2, 1, 1, 1]), "pads": np.array([0, 0, 1, 2, 0, 0, 0, 1]), "flag": np.array(True),
    "elements": np.array([0, 3]).reshape(1, 2, 1, 1).repeat(4, 2).repeat(3, 3), "rows": np.array([[0, 1], [0, 0]]),
    "k": np.array([2]), "length": np.array([3]), "planes": np.zeros((2, 4, 3), np.int8),
    "updates": np.zeros((1, 2, 4, 3), np.int8), "roi": np.zeros(0, np.float32),
    "sizes": np.array([1, 4, 8, 8]), "lengths": np.array([3]), "some": np.array([True, False, True, True]),
}  # fmt: skip
# What happens to q [1, 4, 4, 3], which becomes r; x is there in the same order with r's value.
MOVES = {
    "Identity": "r = Identity(q)",
    "Reshape": "r = Reshape(q, shape)",
    "Flatten": "r = Flatten(q)",
    "Transpose": "r = Transpose <perm = [0, 2, 3, 1]> (q)",
    "Squeeze": "r = Squeeze(q, axes)",
    "Unsqueeze": "r = Unsqueeze(q, axes)",
    "MaxPool": "r = MaxPool <kernel_shape = [2, 2], strides = [2, 1]> (q)",
    "Concat": "r = Concat <axis = 1> (q, q)",
    "Slice": "r = Slice(q, one, ten, two)",
    "Split": "a, r = Split <axis = 1> (q, halves)",
    "Gather": "r = Gather <axis = 2> (q, places)",
    "GatherElements": "r = GatherElements <axis = 1> (q, elements)",
    "GatherND": "r = GatherND(q, rows)",
    "Expand": "r = Expand(q, wide)",
    "Tile": "r = Tile(q, wide)",
    "Pad": "r = Pad(q, pads, zero)",
    "Where": "r = Where(flag, q, zero)",
    "TopK": "r, i = TopK <axis = 2> (q, k)",
    "DepthToSpace": "r = DepthToSpace <blocksize = 2> (q)",
    "ScatterElements": "r = ScatterElements <axis = 1> (q, elements, updates)",
    "Compress": "r = Compress <axis = 1> (q, some)",
    "Clip": "r = Clip(q, zero)",
    "Max": "r = Max(q, zero)",
    "ReduceMax": "r = ReduceMax <axes = [2]> (q)",
    "Resize": 'r = Resize <mode = "nearest"> (q, roi, , sizes)',
    "Cast": "w = Cast <to = 6> (q)\n t = Transpose <perm = [0, 2, 3, 1]> (w)\n r = Cast <to = 3> (t)",
    "SpaceToDepth": "r = SpaceToDepth <blocksize = 1> (q)",
    "ReverseSequence": "r = ReverseSequence <time_axis = 1, batch_axis = 0> (q, length)",
    "ScatterND": "r = ScatterND(q, rows, planes)",
    "ReduceMin": "r = ReduceMin <axes = [1, 3]> (q)",
    "Max, of two": "t = Transpose <perm = [0, 2, 1, 3]> (q)\n r = Max(q, t)",
    "Where, of two": "w = Greater(q, zero)\n t = Transpose <perm = [0, 2, 1, 3]> (q)\n r = Where(w, q, t)",
    "Pad, reflect": 'r = Pad <mode = "reflect"> (q, pads)',
    "Pad, edge": 'r = Pad <mode = "edge"> (q, pads)',
    "two of them": "t = Transpose <perm = [1, 0, 2, 3]> (q)\n r = Reshape(t, shape)",
}


def model_of(move, kind="quantized", opset=17):
    """The sum of x, and of twice what the graph makes of x: a residual, beside which nothing may be lost."""
    around = {"quantized": ("q = QuantizeLinear(x, scale, zero)", "d = DequantizeLinear(r, scale, zero)"),
              "plain": ("q = Identity(x)", "d = Identity(r)")}[kind]  # fmt: skip
    body = f"{around[0]}\n {move}\n {around[1]}\n e = Mul(d, d)\n f = ReduceSum <keepdims = 0> (e)\n y = Add(x, f)"
    constants = {name: np.asarray(value) for name, value in CONSTANTS.items()}
    if kind == "plain":
        constants = {name: each.astype("f4") if each.dtype == np.int8 else each for name, each in constants.items()}
    model = build(f"g (float[1, 4, 4, 3] x) => (float[1, 4, 4, 3] y) {{ {body} }}", opset, constants)
    if kind == "plain":
        for node in model.graph.node:
            if node.op_type == "Cast":
                node.op_type = "Identity"
                del node.attribute[:]
    return model


def picture():
    """Numbers that the integers hold exactly, none twice."""
    return (np.random.default_rng(0).permutation(np.arange(1, 49)).reshape(1, 4, 4, 3) / 16).astype(np.float32)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("move", MOVES)
def test_gradients_are_those_without_quantization(move, plain):
    x = picture()
    found = gradients(model_of(MOVES[move]), "y", "x", plain=plain)
    expected = run(gradients(model_of(MOVES[move], "plain"), "y", "x", plain=True), {"x": x})
    for mine, other in zip(computed(found, {"x": x}, plain), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


REFUSED = {  # how integers r come from q, or from x
    "Add": "w = Cast <to = 6> (q)\n a = Add(w, w)\n r = Cast <to = 3> (a)",
    "Relu": "r = Relu(q)",
    "Odd": "r = my.Odd(q)",
    "Cast": "r = Cast <to = 3> (x)",
    "CastLike": "i = CastLike(x, zero)\n r = Transpose(i)",
    "SequenceAt": "s = SequenceConstruct(q, q)\n r = SequenceAt(s, one)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_with_integers_or_cuts_values_off_beside_a_residual_is_named(name):
    body = f"q = QuantizeLinear(x, scale, zero)  {REFUSED[name]}  d = DequantizeLinear(r, scale, zero)  y = Add(x, d)"
    model = build(f"g (float[3, 3] x) => (float[3, 3] y) {{ {body} }}", constants=CONSTANTS)
    expected = "DequantizeLinear" if name in ("Add", "Relu", "Odd") else ""
    with pytest.raises(NotImplementedError, match=rf"{name}.*integers of a quantized tensor.*expected {expected}"):
        gradients(model, "y", "x")


def test_sizes_places_and_conditions_of_quantized_tensors_are_no_numbers():
    body = """q = QuantizeLinear(x, scale, zero)\n r, i = TopK <axis = 0> (q, k)\n f = Cast <to = 1> (i)
        c = Greater(q, zero)\n w = Where(c, x, x)\n s = ReduceSum <keepdims = 0> (f)\n y = Mul(w, s)"""
    model = build(f"g (float[3] x) => (float[3] y) {{ {body} }}", constants=CONSTANTS)
    x = np.array([1, 3, 2], np.float32)
    assert run(gradients(model, "y", "x", plain=True), {"x": x})[1].tolist() == [3, 3, 3]


def test_dynamic_quantization_passes_gradients_straight_through():
    body = "q, s, z = DynamicQuantizeLinear(x)\n t = Transpose(q)\n d = DequantizeLinear(t, s, z)\n e = Transpose(d)"
    model = build(f"g (float[2, 3] x) => (float[2, 3] y) {{ {body}\n m = Mul(e, e)\n y = Add(x, m) }}")
    x = numbers(2, 3).astype(np.float32)
    _, dx = computed(gradients(model, "y", "x", plain=True), {"x": x})
    np.testing.assert_allclose(dx, 1 + 2 * x, atol=0.05)


def test_rules_of_users_may_carry_integers():
    register_gradient("Odd", "my")(lambda node: node.dy)
    try:
        text = """g (float[3] x) => (float[3] y) { q = QuantizeLinear(x, scale, zero)  r = my.Odd(q)
            d = DequantizeLinear(r, scale, zero)  y = Add(x, d) }"""
        found = gradients(build(text, constants=CONSTANTS), "y", "x", plain=True)
        assert [each.name for each in found.graph.output] == ["y", "x_grad"]
    finally:
        del RULES["my", "Odd"]


def of_blocks(kind, low, high, opset=25, axis=1, block=2):
    """QuantizeLinear with a scale for each block, and the gradient that goes straight through it."""
    x = (RANDOM.normal(size=(3, 5)) * 4).astype(np.float32)
    shape = [-(-size // block) if place == axis else size for place, size in enumerate(x.shape)]
    scales = RANDOM.uniform(0.3, 1.2, shape).astype(np.float32)
    zeros = np.full(shape, (low + high + 1) // 2)
    body = f"q = QuantizeLinear <axis = {axis}, block_size = {block}> (x, s, z)\n"
    body += f" d = DequantizeLinear <axis = {axis}, block_size = {block}> (q, s, z)\n y = Mul(d, d)"
    model = build(f"g (float[3, 5] x) => (float[3, 5] y) {{ {body} }}", opset, {"s": scales})
    model.ir_version = 11
    model.graph.initializer.append(onnx.helper.make_tensor("z", kind, shape, zeros.ravel().tolist()))
    y, dx = computed(gradients(model, "y", "x", plain=True), {"x": x})
    wide, offset = (np.repeat(each, block, axis)[:, : x.shape[1]][: x.shape[0]] for each in (scales, zeros))
    q = np.round(x / wide) + offset
    inside = (q >= low) & (q <= high)
    d = (np.clip(q, low, high) - offset) * wide
    assert 0 < inside.sum() < inside.size
    np.testing.assert_allclose(y, d * d, rtol=1e-5)
    np.testing.assert_allclose(dx, np.where(inside, 2 * d, 0), rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_have_scales_of_their_own(axis):
    of_blocks(TensorProto.INT4, -8, 7, axis=axis)
    of_blocks(TensorProto.UINT4, 0, 15, axis=axis, block=3)


def test_small_floats_saturate():
    body = "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n y = Mul(d, two)"
    model = build(f"g (float[4] x) => (float[4] y) {{ {body} }}", 21, {"s": np.float32(0.5), "two": np.float32(2)})
    model.ir_version = 10
    model.graph.initializer.append(onnx.helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0]))
    y, dx = computed(gradients(model, "y", "x", plain=True), {"x": np.array([1, -3, 200, -300], np.float32)})
    assert y.tolist() == [2, -6, 384, -448]
    assert dx.tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("form", ["one", "axis", "blocks", "odd blocks"])
def test_scales_are_learned(form):
    """The gradient of a step size: q - x / scale where x is within reach, else the bound that was reached."""
    told, shape = {
        "one": ("", []), "axis": ("<axis = 1>", [6]), "blocks": ("<axis = 1, block_size = 3>", [4, 2]),
        "odd blocks": ("<axis = 0, block_size = 3>", [2, 6]),
    }[form]  # fmt: skip
    x = (RANDOM.normal(size=(4, 6)) * 3).astype(np.float32)
    logs, w = RANDOM.uniform(-1, 0.1, shape).astype(np.float32), RANDOM.normal(size=(4, 6)).astype(np.float32)
    body = f"s = Exp(l) q = QuantizeLinear {told} (x, s, z) t = Transpose <perm = [0, 1]> (q)"
    model = build(
        f"g (float[4, 6] x, float{shape} l, float[4, 6] w) => (float[4, 6] y) "
        f"{{ {body} d = DequantizeLinear {told} (t, s, z) y = Mul(d, w) }}".replace("float[] ", "float "), 21
    )  # fmt: skip
    model.ir_version = 11
    model.graph.initializer.append(onnx.helper.make_tensor("z", TensorProto.INT4, shape, [2] * int(np.prod(shape))))
    _, dx, dl = computed(gradients(model, "y", ["x", "l"], plain=True), {"x": x, "l": logs, "w": w})
    wide = np.exp(logs.astype(np.float64))
    if "blocks" in form:
        wide = np.repeat(wide, 3, 1 if form == "blocks" else 0)[:4, :6]
    wide = np.broadcast_to(wide, x.shape)
    q = np.round(x / wide) + 2
    inside = (q >= -8) & (q <= 7)
    assert 0 < inside.sum() < inside.size
    slope = w * (np.clip(q, -8, 7) - 2 - np.where(inside, x / wide, 0)) * wide
    if form == "blocks":
        expected = slope.reshape(4, 2, 3).sum(2)
    elif form == "odd blocks":
        expected = np.stack([slope[:3].sum(0), slope[3:].sum(0)])
    else:
        expected = slope.sum(0) if form == "axis" else slope.sum()
    np.testing.assert_allclose(dx, np.where(inside, w, 0), rtol=1e-5)
    np.testing.assert_allclose(dl, expected, rtol=1e-4, atol=1e-5)


def test_scales_that_are_measured_count_as_constants():
    """Those of dynamic quantization, written with plain operators."""
    text = """g (float[3] x) => (float[3] y) {
        a = Abs(x) m = ReduceMax <keepdims = 0> (a) n = Constant <value = float {127}> () s = Div(m, n)
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Mul(d, d) }"""
    x = np.array([1.0, -2.0, 0.3], np.float32)
    _, dx = computed(gradients(build(text, constants={"z": np.int8(0)}), "y", "x", plain=True), {"x": x})
    np.testing.assert_allclose(dx, 2 * np.round(x / 2 * 127) * 2 / 127, rtol=1e-5)

"""Operators that compute with quantized integers: gradients are those of PyTorch on the floats, straight through."""

import numpy as np
import onnx
import pytest
import torch
from differences import build
from onnx import numpy_helper
from runtime_cases import session_of

from opgrad.gradients import gradients
from opgrad.onnxruntime import lower

RANDOM = np.random.default_rng(4)
S, WS, ZERO, WZERO = 2.0**-5, 0.01, 128, 3
WEIGHTS = RANDOM.integers(-100, 100, (3, 4)).astype(np.int8)
COLUMNS = RANDOM.uniform(0.005, 0.02, 4).astype(np.float32)
OFFSETS = RANDOM.integers(-5, 5, 4).astype(np.int8)
FILTER = RANDOM.integers(-100, 100, (4, 3, 3, 3)).astype(np.int8)
CONSTANTS = {
    "s": np.float32(S), "z": np.uint8(ZERO), "ws": np.float32(WS), "wz": np.int8(WZERO), "w": WEIGHTS,
    "columns": COLUMNS, "offsets": OFFSETS, "bias": RANDOM.normal(size=4).astype(np.float32),
    "filter": FILTER, "whole": RANDOM.integers(-900, 900, 4).astype(np.int32), "out": np.float32(2.0**-2),
    "other": RANDOM.integers(0, 255, (2, 3)).astype(np.uint8), "shares": np.float32(1 / 256), "none": np.uint8(0),
    "condition": np.array([[True], [False]]), "no": np.int8(0),
    "projections": RANDOM.integers(-100, 100, (8, 24)).astype(np.int8), "no16": np.int16(0),
    "bias24": RANDOM.normal(size=24).astype(np.float32), "w16": WEIGHTS.astype(np.int16),
}  # fmt: skip
FLOATS = {name: torch.tensor(value.astype(np.float64)) for name, value in CONSTANTS.items() if name != "condition"}
W = (FLOATS["w"] - WZERO) * WS
BY_COLUMN = (FLOATS["w"] - FLOATS["offsets"]) * FLOATS["columns"]
IMAGE = (1, 3, 6, 5)
OTHER = (FLOATS["other"] - ZERO) * S


def dynamic(op, scale, *others):
    """What onnxruntime's dynamic quantization writes for a product."""
    given = ", ".join(("q", *others))
    rest = f"f = Cast <to = 1> (i)\n m = Mul(t, {scale})\n y = Mul(f, m)"
    return f"q, t, o = DynamicQuantizeLinear(x)\n i = {op} ({given})\n {rest}"


def static(call, scale="out"):
    """An operator between the two that quantize and dequantize."""
    zero = "none" if scale == "shares" else "z"
    return f"q = QuantizeLinear(x, s, z)\n r = {call}\n y = DequantizeLinear(r, {scale}, {zero})"


def of(op, middle="", attributes=""):
    return static(f"com.microsoft.{op} {attributes} (q, s, z, {middle} out, z)")


def last(function):
    """A function of images on images with their channels at the end."""
    return lambda x: function(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


conv = torch.nn.functional.conv2d
FILTERED = (FLOATS["filter"] - WZERO) * WS
BY_FILTER = FLOATS["filter"] * FLOATS["columns"].reshape(-1, 1, 1, 1)
HALF = "<kernel_shape = [2, 2], strides = [2, 1]{}>"
# What the graph computes, what it is of the floats, and the shape of x.
CASES = {
    "MatMulInteger": (dynamic("MatMulInteger", "ws", "w", "o", "wz"), lambda x: x @ W, (2, 3)),
    "MatMulInteger, columns": (dynamic("MatMulInteger", "columns", "w", "o", "offsets"), lambda x: x @ BY_COLUMN,
                               (2, 3)),
    "MatMulInteger, moved": (
        "q, t, o = DynamicQuantizeLinear(x)\n a = Transpose(q)\n i = MatMulInteger(a, w, o)\n j = Transpose(i)\n"
        " f = Cast <to = 1> (j)\n m = Mul(t, ws)\n y = Mul(f, m)", lambda x: (x.T @ (FLOATS["w"] * WS)).T, (3, 2),
    ),
    "MatMulInteger, static": (
        "q = QuantizeLinear(x, s, z)\n i = MatMulInteger(q, w, z)\n f = Cast <to = 1> (i)\n m = Mul(s, ws)\n"
        " y = Mul(f, m)",
        lambda x: x @ (FLOATS["w"] * WS), (2, 3),
    ),
    "ConvInteger": (
        dynamic("ConvInteger <pads = [1, 1, 1, 1], strides = [2, 1]>", "ws", "filter", "o", "wz"),
        lambda x: conv(x, FILTERED, padding=1, stride=(2, 1)), IMAGE,
    ),
    "Cast": ("q = QuantizeLinear(x, s, none)\n f = Cast <to = 1> (q)\n y = Mul(f, s)",
             lambda x: torch.where(x >= 0, x, 0), (2, 3)),
    "DynamicQuantizeMatMul": (
        "y = com.microsoft.DynamicQuantizeMatMul(x, w, columns, offsets, bias)",
        lambda x: x @ BY_COLUMN + FLOATS["bias"], (2, 3),
    ),
    "MatMulIntegerToFloat": (
        "q = QuantizeLinear(x, s, z)\n y = com.microsoft.MatMulIntegerToFloat(q, w, s, ws, z, wz, bias)",
        lambda x: x @ W + FLOATS["bias"], (2, 3),
    ),
    "QGemm": (of("QGemm", "w, columns, offsets, whole,", "<alpha = 0.5>"),
              lambda x: 0.5 * (x @ BY_COLUMN) + 0.5 * S * FLOATS["columns"] * FLOATS["whole"], (2, 3)),
    "QGemm, floats": ("q = QuantizeLinear(x, s, z)\n y = com.microsoft.QGemm <transA = 1> (q, s, z, w, ws, wz)",
                      lambda x: x.T @ W, (3, 2)),
    "QLinearMatMul": (static("QLinearMatMul(q, s, z, w, ws, wz, out, z)"), lambda x: x @ W, (2, 3)),
    "QLinearConv": (static("QLinearConv <pads = [1, 1, 1, 1]> (q, s, z, filter, columns, no4, out, z, whole)"),
                    lambda x: conv(x, BY_FILTER, S * FLOATS["columns"] * FLOATS["whole"], padding=1), IMAGE),
    "QLinearConv, channels last": (of("QLinearConv", "filter, ws, wz,", "<channels_last = 1>"),
                                   last(lambda x: conv(x, FILTERED)), (1, 6, 5, 3)),
    "QLinearAdd": (of("QLinearAdd", "other, s, z,"), lambda x: x + OTHER, (2, 3)),
    "QLinearMul": (of("QLinearMul", "other, s, z,"), lambda x: x * OTHER, (2, 3)),
    "QLinearSigmoid": (static("com.microsoft.QLinearSigmoid(q, s, z, shares, none)", "shares"), torch.sigmoid, (2, 3)),
    "QLinearLeakyRelu": (of("QLinearLeakyRelu", "", "<alpha = 0.2>"),
                         lambda x: torch.nn.functional.leaky_relu(x, 0.2), (2, 3)),
    "QLinearSoftmax": (static("com.microsoft.QLinearSoftmax <axis = -1, opset = 13> (q, s, z, shares, none)", "shares"),
                       lambda x: torch.softmax(x, -1), (2, 3)),
    "QLinearSoftmax, several axes": (
        static("com.microsoft.QLinearSoftmax <axis = 1, opset = 11> (q, s, z, shares, none)", "shares"),
        lambda x: torch.softmax(x.flatten(1), -1).reshape(x.shape), (2, 3, 2)),
    "QLinearAveragePool": (of("QLinearAveragePool", "", HALF.format("")),
                           lambda x: torch.nn.functional.avg_pool2d(x, 2, (2, 1)), IMAGE),
    "QLinearAveragePool, channels last": (of("QLinearAveragePool", "", HALF.format(", channels_last = 1")),
                                          last(lambda x: torch.nn.functional.avg_pool2d(x, 2, (2, 1))), IMAGE),
    "QLinearGlobalAveragePool": (of("QLinearGlobalAveragePool"), lambda x: x.mean((2, 3), keepdim=True), IMAGE),
    "QLinearConcat": (static("com.microsoft.QLinearConcat <axis = 1> (out, z, q, s, z, other, s, z)"),
                      lambda x: torch.cat([x, OTHER], 1), (2, 3)),
    "QLinearWhere": (static("com.microsoft.QLinearWhere(condition, q, s, z, other, s, z, out, z)"),
                     lambda x: torch.where(torch.tensor(CONSTANTS["condition"]), x, OTHER), (2, 3)),
    "NhwcMaxPool": (static("com.microsoft.NhwcMaxPool <kernel_shape = [2, 2], strides = [2, 1]> (q)", "s"),
                    last(lambda x: torch.nn.functional.max_pool2d(x, 2, (2, 1))), (1, 6, 5, 3)),
    "com.microsoft": ("q = com.microsoft.QuantizeLinear(x, s, z)\n y = com.microsoft.DequantizeLinear(q, s, z)",
                      lambda x: x, (2, 3)),
}  # fmt: skip


def attention(x):
    """Two heads of 4, of quantized projections."""
    parts = (x @ (FLOATS["projections"] * WS) + FLOATS["bias24"]).split(8, -1)
    q, k, v = (each.reshape(2, 3, 2, 4).transpose(1, 2) for each in parts)
    p = torch.softmax(q @ k.transpose(2, 3) / 2, -1)
    return (p @ v).transpose(1, 2).reshape(2, 3, 8)


CASES["QAttention"] = (
    "q = QuantizeLinear(x, s, z)\n"
    "y = com.microsoft.QAttention <num_heads = 2> (q, projections, bias24, s, ws, , z, no)",
    attention,
    (2, 3, 8),
)
CASES["MatMulInteger16"] = (
    "q = com.microsoft.QuantizeLinear(x, s, no16)\n i = com.microsoft.MatMulInteger16(q, w16)\n"
    " f = Cast <to = 1> (i)\n y = Mul(f, s)", lambda x: x @ FLOATS["w16"], (2, 3),
)  # fmt: skip


def model_of(body, shape, result):
    model = build(f"g (float{list(shape)} x) => (float{list(result)} y) {{ {body} }}")
    constants = {**CONSTANTS, "no4": np.zeros(4, np.int8)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(each), key) for key, each in constants.items())
    return model


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_floats(name):
    body, formula, shape = CASES[name]
    random = np.random.default_rng(len(name))
    x = random.normal(size=shape).astype(np.float32)
    x = (
        (np.round(x / S) * S).astype(np.float32) if "Dynamic" not in body else x
    )  # whose rounding moves no largest element
    wide = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    expected = formula(wide)
    model = model_of(body, shape, expected.shape)
    step = 2.0**-7 if "shares" in body else 2.0**-2
    np.testing.assert_allclose(session_of(model).run(None, {"x": x})[0], expected.detach(), atol=step)
    factor = random.normal(size=expected.shape).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(factor, "factor"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["y", "factor"], ["weighted"]))
    found = session_of(lower(gradients(model, "weighted", "x"))).run(["x_grad"], {"x": x})[0]
    (expected * torch.tensor(factor)).sum().backward()
    np.testing.assert_allclose(found, wide.grad, rtol=2e-5, atol=2e-5)


def test_what_the_integers_cannot_reach_has_no_gradient():
    """QLinearConv and its like clip their results, as a Relu that was fused into them does."""
    body = static("QLinearMatMul(q, s, z, w, ws, wz, s, none)", "s").replace("(r, s, z)", "(r, s, none)")
    model = model_of(body, (2, 3), (2, 4))
    x = np.array([[1, -2, 0.5], [-1, 1.5, 2]], np.float32)
    positive = (x @ W.numpy()) > 0
    assert 0 < positive.sum() < positive.size
    found = session_of(lower(gradients(model, "y", "x"))).run(["x_grad"], {"x": x})[0]
    np.testing.assert_allclose(found, positive @ W.numpy().T, rtol=1e-5)


def test_integers_of_several_scales_are_no_numbers():
    model = model_of(
        "q = QuantizeLinear(x, columns, no4)\n f = Cast <to = 1> (q)\n y = Mul(f, columns)", (2, 4), (2, 4)
    )
    with pytest.raises(NotImplementedError, match=r"Cast.*a scale for each place along an axis"):
        gradients(model, "y", "x")


def test_layers_with_quantized_weights():
    random, hidden = np.random.default_rng(0), 4
    w, r = (
        random.integers(-100, 100, (1, 5, 16)).astype(np.int8),
        random.integers(-100, 100, (1, 4, 16)).astype(np.int8),
    )
    scales, offsets = random.uniform(0.005, 0.01, (2, 1, 16)).astype(np.float32), np.zeros((1, 16), np.int8)
    bias, x = random.normal(size=(1, 32)).astype(np.float32), random.normal(size=(3, 2, 5)).astype(np.float32)
    call = "com.microsoft.DynamicQuantizeLSTM <hidden_size = 4> (x, lw, lr, lb, , , , , ls, lz, rs, lz)"
    model = build(f"g (float[3, 2, 5] x) => (float[3, 1, 2, 4] y) {{ y, h, c = {call} }}")
    given = {"lw": w, "lr": r, "lb": bias, "ls": scales[0], "rs": scales[1], "lz": offsets}
    model.graph.initializer.extend(numpy_helper.from_array(each, key) for key, each in given.items())
    wide = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    weights = [torch.tensor(q[0].astype(np.float64) * s).T for q, s in ((w, scales[0]), (r, scales[1]))]
    h = c = torch.zeros(2, hidden, dtype=torch.float64)
    b = torch.tensor(bias[0].reshape(2, 16).sum(0))
    rows = []
    for each in wide:
        i, o, f, g = (each @ weights[0].T + h @ weights[1].T + b).split(hidden, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        rows.append(h)
    expected, factor = torch.stack(rows)[:, None], random.normal(size=(3, 1, 2, 4)).astype(np.float32)
    np.testing.assert_allclose(session_of(model).run(["y"], {"x": x})[0], expected.detach(), atol=0.03)
    model.graph.initializer.append(numpy_helper.from_array(factor, "factor"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["y", "factor"], ["weighted"]))
    found = session_of(lower(gradients(model, "weighted", "x"))).run(["x_grad"], {"x": x})[0]
    (expected * torch.tensor(factor)).sum().backward()
    np.testing.assert_allclose(found, wide.grad, rtol=2e-5, atol=2e-5)

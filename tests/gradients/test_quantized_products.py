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
    "filter": FILTER, "none": np.uint8(0), "no4": np.zeros(4, np.int8),
}  # fmt: skip
FLOATS = {name: torch.tensor(value.astype(np.float64)) for name, value in CONSTANTS.items()}
W = (FLOATS["w"] - WZERO) * WS
BY_COLUMN = (FLOATS["w"] - FLOATS["offsets"]) * FLOATS["columns"]
IMAGE = (1, 3, 6, 5)


def dynamic(op, scale, *others):
    """What onnxruntime's dynamic quantization writes for a product."""
    given = ", ".join(("q", *others))
    rest = f"f = Cast <to = 1> (i)\n m = Mul(t, {scale})\n y = Mul(f, m)"
    return f"q, t, o = DynamicQuantizeLinear(x)\n i = {op} ({given})\n {rest}"


conv = torch.nn.functional.conv2d
FILTERED = (FLOATS["filter"] - WZERO) * WS
# What the graph computes, what it is of the floats, and the shape of x.
CASES = {
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
    "com.microsoft": ("q = com.microsoft.QuantizeLinear(x, s, z)\n y = com.microsoft.DequantizeLinear(q, s, z)",
                      lambda x: x, (2, 3)),
}  # fmt: skip


def model_of(body, shape, result):
    return build(f"g (float{list(shape)} x) => (float{list(result)} y) {{ {body} }}", constants=CONSTANTS)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_floats(name):
    body, formula, shape = CASES[name]
    random = np.random.default_rng(len(name))
    x = random.normal(size=shape).astype(np.float32)
    if "Dynamic" not in body:  # whose rounding moves no largest element
        x = (np.round(x / S) * S).astype(np.float32)
    wide = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    expected = formula(wide)
    model = model_of(body, shape, expected.shape)
    np.testing.assert_allclose(session_of(model).run(None, {"x": x})[0], expected.detach(), atol=2.0**-2)
    factor = random.normal(size=expected.shape).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(factor, "factor"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["y", "factor"], ["weighted"]))
    found = session_of(lower(gradients(model, "weighted", "x"))).run(["x_grad"], {"x": x})[0]
    (expected * torch.tensor(factor)).sum().backward()
    np.testing.assert_allclose(found, wide.grad, rtol=2e-5, atol=2e-5)


def test_integers_of_several_scales_are_no_numbers():
    body = "q = QuantizeLinear(x, columns, no4)\n f = Cast <to = 1> (q)\n y = Mul(f, columns)"
    with pytest.raises(NotImplementedError, match=r"Cast.*a scale for each place along an axis"):
        gradients(model_of(body, (2, 4), (2, 4)), "y", "x")

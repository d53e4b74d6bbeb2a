"""Products with frozen integers as weights: the gradient of the other operand, for which they stay packed."""

import numpy as np
import pytest
from differences import build
from onnx import TensorProto, helper, numpy_helper

from opgrad.gradients import gradients
from opgrad.onnx.graph.nodes import read_by
from opgrad.onnxruntime import InferenceSession

RANDOM = np.random.default_rng(7)
DEPTH, WIDTH, BLOCK = 32, 12, 4
FLOAT = TensorProto.FLOAT
KINDS = {
    "int8": (TensorProto.INT8, -128, 127),
    "uint8": (TensorProto.UINT8, 0, 255),
    "int4": (TensorProto.INT4, -8, 7),
    "uint4": (TensorProto.UINT4, 0, 15),
}
BLOCKS = {"tensor": {}, "rows": {"axis": 0}, "columns": {"axis": 1}}
BLOCKS |= {f"blocks of {what}": {"axis": axis, "block_size": BLOCK} for axis, what in enumerate(("rows", "columns"))}


def tensor(name, kind, values):
    """An initializer of any type."""
    return numpy_helper.from_array(np.asarray(values).astype(helper.tensor_dtype_to_np_dtype(kind)), name)


def quantized(kind, how, shape, zeros):
    """Integers with scales and zero points as initializers, and the floats that they are, in float64."""
    number, low, high = KINDS[kind]
    given = BLOCKS[how]
    axis, size = given.get("axis", 0), given.get("block_size", 0)
    sizes = () if not given else (shape[axis],)
    if size:
        sizes = tuple(each // size if place == axis else each for place, each in enumerate(shape))
    q = RANDOM.integers(low, high + 1, shape)
    scales = RANDOM.uniform(0.01, 0.05, sizes).astype(np.float32)
    offsets = RANDOM.integers(low // 2, high // 2 + 1, sizes) if zeros else np.zeros(sizes, np.int64)

    def spread(values):
        if size:
            return np.repeat(values, size, axis)
        return values if not given else np.expand_dims(values, 1 - axis)

    floats = (q - spread(offsets)) * spread(scales.astype(np.float64))
    held = [tensor("q", number, q), tensor("scales", FLOAT, scales)]
    held += [tensor("zeros", number, offsets)] if zeros else []
    return held, floats, given


def model_of(body, held, lead=(2, 3), width=WIDTH):
    """y = p * c, where the body makes p of x."""
    rows = ", ".join(map(str, lead))
    ports = f"(float[{rows}, {DEPTH}] x, float[{rows}, {width}] c) => (float[] y)"
    model = build(f"g {ports} {{ {body} y = Mul (p, c) }}", 21)
    model.graph.initializer.extend(held)
    model.ir_version = 10
    return model


PRODUCTS = {
    "MatMul": "p = MatMul ({x}, w)",
    "Gemm": "p = Gemm <transB = 1, alpha = 0.5> ({x}, w)",
    "transposed": "t = Transpose <perm = [1, 0]> (w) p = MatMul ({x}, t)",
}


def product(kind, how, form, zeros, before="", x="x"):
    """y = (x @ w) * c, and w in float64."""
    transposed, lead = form != "MatMul", (2,) if form == "Gemm" else (2, 3)
    held, floats, given = quantized(kind, how, (WIDTH, DEPTH) if transposed else (DEPTH, WIDTH), zeros)
    attributes = ", ".join(f"{name} = {value}" for name, value in given.items())
    unpack = f"w = DequantizeLinear {f'<{attributes}>' if given else ''} ({', '.join(each.name for each in held)})"
    w = (floats.T if transposed else floats) * (0.5 if form == "Gemm" else 1)
    return model_of(f"{before} {unpack} {PRODUCTS[form].format(x=x)}", held, lead), w, lead


def check(model, w, lead, numbers=lambda x: x):
    """Compare result and gradient with those in float64. numbers: of which the product is, given x."""
    x, c = (RANDOM.normal(size=(*lead, size)).astype(np.float32) for size in w.shape)
    made = gradients(model, "y", "x")
    y, dx = InferenceSession(made.SerializeToString()).run(["y", "x_grad"], {"x": x, "c": c})
    x, c = x.astype(np.float64), c.astype(np.float64)
    exact = numbers(x) @ w * c
    error = 2.0**-22 * max(w.shape)
    np.testing.assert_allclose(y, exact, atol=error * float(np.abs(x).max() * np.abs(w).max() * np.abs(c).max()))
    np.testing.assert_allclose(dx, c @ w.T, atol=error * float(np.abs(c).max() * np.abs(w).max()))
    return made


def assert_packed(made, weights):
    """The floats of the weights are read by the forward part alone: by the product, or what transposes them."""
    nodes = list(made.graph.node)
    assert [node.op_type for node in nodes].count("QuantizedMatMulGrad") == 1
    assert sum(weights in node.input for node in nodes) <= 1
    behind = [node for node in nodes if node.op_type == "Transpose"]
    assert all(sum(each.output[0] in node.input for node in nodes) == 1 for each in behind)
    assert "q_grad" not in read_by(nodes)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", BLOCKS)
def test_gradients_of_products(kind, how, form):
    model, w, lead = product(kind, how, form, zeros=how != "rows")
    assert_packed(check(model, w, lead), "w")


def test_odd_rows_of_four_bits_are_unpacked():
    """A row begins in the middle of a byte there."""
    held, w, _ = quantized("int4", "tensor", (DEPTH, 7), False)
    made = check(model_of("w = DequantizeLinear (q, scales) p = MatMul (x, w)", held, (3,), 7), w, (3,))
    assert "QuantizedMatMulGrad" not in {node.op_type for node in made.graph.node}


def test_numbers_of_four_bits_in_fields_of_their_own():
    model, w, lead = product("int4", "columns", "MatMul", True)
    q = next(each for each in model.graph.initializer if each.name == "q")
    q.int32_data.extend(np.frombuffer(q.raw_data, np.uint8).tolist())
    q.ClearField("raw_data")
    assert_packed(check(model, w, lead), "w")


@pytest.mark.parametrize("how", ["tensor", "columns"])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_pairs_around_the_other_operand(kind, how):
    """The gradient goes straight through the rounding of x; onnxruntime's integer kernels may compute forward."""
    pair = "x_q = QuantizeLinear (x, x_scale, x_zero) x_d = DequantizeLinear (x_q, x_scale, x_zero)"
    model, w, lead = product(kind, how, "MatMul", how == "tensor", pair, "x_d")
    step = np.float32(2.0**-4)
    model.graph.initializer.append(tensor("x_scale", FLOAT, step))
    model.graph.initializer.append(tensor("x_zero", TensorProto.UINT8, np.array(128)))
    made = check(model, w, lead, lambda x: np.round(x / step) * step)
    assert_packed(made, "w")


QUANTIZE = "x_q, x_scale, x_zero = DynamicQuantizeLinear (x)"
DYNAMIC = {
    "MatMulInteger": f"""{QUANTIZE} sums = MatMulInteger (x_q, q, x_zero, zeros) floats = Cast <to = 1> (sums)
        scale = Mul (x_scale, scales) p = Mul (floats, scale)""",
    "DynamicQuantizeMatMul": "p = com.microsoft.DynamicQuantizeMatMul (x, q, scales, zeros)",
    "MatMulIntegerToFloat": f"""{QUANTIZE}
        p = com.microsoft.MatMulIntegerToFloat (x_q, q, x_scale, scales, x_zero, zeros)""",
}


def rounded(x):
    """What DynamicQuantizeLinear makes of an array."""
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = (high - low) / 255
    zero = np.clip(np.round(-low / scale), 0, 255)
    return (np.clip(np.round(x / scale) + zero, 0, 255) - zero) * scale


@pytest.mark.parametrize("how", ["tensor", "columns"])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("op", DYNAMIC)
def test_dynamic_quantization(op, kind, how):
    held, w, _ = quantized(kind, how, (DEPTH, WIDTH), True)
    made = check(model_of(DYNAMIC[op], held), w, (2, 3), rounded)
    nodes = list(made.graph.node)
    assert [node.op_type for node in nodes].count("QuantizedMatMulGrad") == 1
    assert "DequantizeLinear" not in {node.op_type for node in nodes}
    assert sum("q" in node.input for node in nodes) == 2

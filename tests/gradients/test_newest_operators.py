"""Operators of ONNX's newest opsets, which onnxruntime does not run yet, in ONNX's evaluator against PyTorch."""

import numpy as np
import onnx
import pytest
from differences import run

from opgrad.gradients import gradients

torch = pytest.importorskip("torch")


def compare(text, shapes, outputs, formula):
    """The results and their gradients with respect to all inputs, for inputs of these shapes."""
    random = np.random.default_rng(0)
    feeds = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found = run(gradients(onnx.parser.parse_model(text), list(outputs), list(shapes), plain=True), feeds)
    given = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in feeds.values()]
    results = formula(*given)
    expected = torch.autograd.grad(sum(each.sum() for each in results), given)
    for name, mine, other in zip((*outputs, *shapes), found, (*results, *expected), strict=True):
        np.testing.assert_allclose(mine, other.detach(), rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("alpha", [1.0, 1.702])
def test_swiglu(alpha):
    text = f"""<ir_version: 10, opset_import: ["": 28]> g (float[3, 5] a, float[3, 5] b) => (float[3, 5] y) {{
        y = SwiGLU <alpha = {alpha}> (a, b) }}"""
    compare(text, {"a": (3, 5), "b": (3, 5)}, ["y"], lambda a, b: [a * torch.sigmoid(alpha * a) * b])


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("given", [("bias", "past"), ("bias",), ("past",), ()])
def test_causal_convolution_with_state(activation, given):
    rows, channels, length, taps = 2, 3, 5, 4
    shapes = {"x": (rows, channels, length), "w": (channels, 1, taps)}
    shapes |= {name: {"bias": (channels,), "past": (rows, channels, taps - 1)}[name] for name in given}

    def formula(x, w, *others):
        rest = dict(zip(given, others, strict=True))
        whole = torch.cat([rest.get("past", x.new_zeros(rows, channels, taps - 1)), x], 2)
        y = torch.nn.functional.conv1d(whole, w, rest.get("bias"), groups=channels)
        return [torch.nn.functional.silu(y) if activation == "silu" else y, whole[:, :, -(taps - 1) :]]

    told = ", ".join(f"float{list(shape)} {name}" for name, shape in shapes.items())
    places = ", ".join(name if name in shapes else '""' for name in ("x", "w", "bias", "past"))
    text = f"""<ir_version: 10, opset_import: ["": 27]>
        g ({told}) => (float[2, 3, 5] y, float[2, 3, 3] state) {{
        y, state = CausalConvWithState <activation = "{activation}"> ({places}) }}"""
    compare(text, shapes, ["y", "state"], formula)


def test_scores_of_attention():
    """With the mask, as the fourth result, which onnxruntime does not give."""
    shapes = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4), "mask": (3, 5)}

    def formula(q, k, v, mask):
        masked = 1.5 * torch.tanh(q @ k.transpose(2, 3) / 3) + mask
        return [torch.softmax(masked, 3) @ v, masked]

    told = ", ".join(f"float{list(shape)} {name}" for name, shape in shapes.items())
    text = f"""<ir_version: 10, opset_import: ["": 24]>
        g ({told}) => (float[2, 2, 3, 4] y, float[2, 2, 3, 5] scores) {{
        y, "", "", scores = Attention <softcap = 1.5, qk_matmul_output_mode = 2> (q, k, v, mask) }}"""
    compare(text, shapes, ["y", "scores"], formula)


INVERSE = """<ir_version: 9, opset_import: ["": 20]> g (float[2, {size}, 2] x) => (float[2, length, 1] y) {{
    length = Constant <value = int64 {{{length}}}> ()  axis = Constant <value = int64 {{-2}}> ()
    y = DFT <inverse = 1, onesided = 1> (x, length, axis) }}"""


@pytest.mark.parametrize("length", [1, 2, 6, 7, 12])
def test_inverse_fourier_transform_of_one_side(length):
    """Of more or fewer numbers than a length of a side has."""

    def formula(x):
        return [torch.fft.irfft(torch.complex(x[..., 0], x[..., 1]), length).unsqueeze(-1)]

    compare(INVERSE.format(size="some", length=length), {"x": (2, 5, 2)}, ["y"], formula)


def test_inverse_of_one_side_that_onnxruntime_computes_otherwise():
    model = onnx.parser.parse_model(INVERSE.format(size=5, length=7))
    with pytest.raises(NotImplementedError, match=r"DFT .*: it is an inverse of one side with 5 numbers, expected 4"):
        gradients(model, ["y"], ["x"])

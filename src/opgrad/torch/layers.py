"""Layers of language models on tensors, by opgrad's CPU kernels.

Each has the operators of training graphs for its value and its gradient. Gradients of gradients are those of the
layer's formula in PyTorch's functions. On CUDA, and while a model is exported, PyTorch's functions are called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries.torch_calls import native
from opgrad.ops import graph_operators
from opgrad.torch.autocast import widens_softmax, widest
from opgrad.torch.derivative import describe, pulled_back, wide
from opgrad.torch.formulas import Gradients, differentiate
from opgrad.torch.operators import ERRORS, TensorOperator, in_words, is_exported
from opgrad.torch.schema import REGISTERED

Values = Mapping[str, Any]  # a call's arguments and results by name
Formula = Callable[[Values], Tensor]
SEEDS = 2**62  # drawn by PyTorch's generator


def _registered(name: str) -> TensorOperator:
    """The operator, with all arrays in front of the attributes, as a schema has what has no default."""
    op = graph_operators()[name]
    arrays = [each for each in op.parameters if each in op.inputs]
    made = TensorOperator(replace(op, parameters=(*arrays, *(each for each in op.parameters if each not in arrays))))
    REGISTERED[name] = made
    return made


def _differentiated(name: str, formula: Formula, arrays: Sequence[str]) -> TensorOperator:
    """The operator of a layer, with all its derivatives; arrays: those that have gradients.

    formula: the layer's first result, by its arguments, in PyTorch's functions.
    """
    forward, backward = _registered(name), _registered(f"{name}_grad")
    results, given = [*forward.op.results], [*backward.op.arrays[1:], *backward.op.attributes]

    def gradient(*values: Any) -> Gradients:
        dy, saved = values[0], values[len(results) :]
        if dy is None:
            return dict.fromkeys(arrays)
        found = backward.call(dy, *saved)
        several = found if isinstance(found, tuple) else (found,)
        return {each.removeprefix("d"): value for each, value in zip(backward.op.results, several, strict=True)}

    def pulled(**known: Any) -> Sequence[Tensor]:
        names = [each for each in arrays if known.get(each, known["dy"]) is not None]

        def of(*now: Tensor) -> Tensor:
            return formula({**known, **dict(zip(names, now, strict=True))})

        # The layer is linear in an array that the gradient does not know: any numbers will do.
        missing = torch.zeros_like(known["scale" if "scale" in known else "dy"])
        return pulled_back(of, [known.get(each, missing) for each in names], [known["dy"]])

    describe(gradient, [*(f"d_{each}" for each in results), *given])
    describe(pulled, backward.names)
    forward.differentiate(gradient)
    differentiate(backward, pulled)
    return forward


# --- formulas ---------------------------------------------------------------------------------------------------------


def _gelu(values: Values) -> Tensor:
    return functional.gelu(values["x"])


def _fast_gelu(values: Values) -> Tensor:
    return functional.gelu(values["x"], approximate="tanh")


def _gated(values: Values) -> Tensor:
    activation, gate = values["activation"], values["gate"]
    if activation == "silu":
        return functional.silu(gate) * values["up"]
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * values["up"]


def _normalized(values: Values) -> Tensor:
    """Normalization with the epsilon that the statistics had."""
    x, axis, inv_std = values["x"], values["axis"], values["inv_std"]
    first = (axis[0] if isinstance(axis, list | tuple) else axis) % x.dim()
    dims, number = tuple(range(first, x.dim())), wide(x.dtype)
    centered = x.to(number)
    if "mean" in values:
        centered = centered - centered.mean(dims, keepdim=True)
    square = (centered * centered).mean(dims, keepdim=True)
    epsilon = inv_std**-2 - square.detach()
    y = centered * (square + epsilon).rsqrt() * values["scale"].to(number)
    bias = values.get("bias")
    return (y if bias is None else y + bias.to(number)).to(x.dtype)


def _dropped(values: Values) -> Tensor:
    kept = values["mask"] / max(1 - values["ratio"], 1e-30) if values["ratio"] < 1 else values["mask"] * 0.0
    found: Tensor = values["x"] * kept.to(values["x"].dtype)
    return found


_gelu_operator = _differentiated("gelu", _gelu, ("x",))
_fast_gelu_operator = _differentiated("fast_gelu", _fast_gelu, ("x",))
_gated_operator = _differentiated("gated_linear_unit", _gated, ("gate", "up"))
_layer_norm = _differentiated("layer_normalization", _normalized, ("x", "scale", "bias"))
_rms_norm = _differentiated("simplified_layer_normalization", _normalized, ("x", "scale"))
_dropout = _differentiated("dropout", _dropped, ("x",))


# --- softmax with a sink ----------------------------------------------------------------------------------------------


def _with_sink(x: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """sink_softmax: the last of the probabilities is left away; and the logarithm of the sum of exponentials."""
    z = x.to(wide(x.dtype))
    z = torch.cat([z, sink.to(z.dtype).view(-1, 1, 1).expand(*z.shape[:-1], 1)], -1)
    return z.softmax(-1)[..., :-1].to(x.dtype), z.logsumexp(-1)


def _with_sink_back(dy: Tensor, y: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """sink_softmax_grad."""
    total = (y * dy).sum(-1, keepdim=True)
    rest = (sink.to(lse.dtype).unsqueeze(1) - lse).exp()
    return y * (dy - total), -(rest * total.squeeze(-1)).sum((0, 2)).to(sink.dtype)


def _sinks() -> TensorOperator:
    """The operator of softmax with a sink, whose gradient is of its results."""
    forward, backward = _registered("sink_softmax"), _registered("sink_softmax_grad")

    def gradient(dy: Tensor | None, dlse: Tensor | None, y: Tensor, lse: Tensor, sink: Tensor) -> Gradients:
        dx, dsink = backward.call(torch.zeros_like(y) if dy is None else dy, y, lse, sink)
        if dlse is not None:
            dx = dx + (dlse.unsqueeze(-1) * y).to(dx.dtype)
            dsink = dsink + (dlse * (sink.to(lse.dtype).unsqueeze(1) - lse).exp()).sum((0, 2)).to(dsink.dtype)
        return {"x": dx, "sink": dsink}

    forward.differentiate(gradient)
    differentiate(backward, _with_sink_back)
    return forward


_sink_softmax = _sinks()


# --- functions --------------------------------------------------------------------------------------------------------


def is_torchs(x: Tensor) -> bool:
    """Whether PyTorch's function is called."""
    return x.is_cuda or is_exported()


@native
def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit.

    input: any shape; float32, float64, float16 or bfloat16. approximate: "none", or "tanh" for its approximation.

    Returns y, of the shape and dtype of input. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = x / 2 * (1 + erf(x / sqrt(2))), or x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).
    Source: torch.nn.functional.gelu.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is {approximate!r}, expected 'none' or 'tanh'")
    if is_torchs(input):
        return functional.gelu(input, approximate=approximate)
    found: Tensor = (_gelu_operator if approximate == "none" else _fast_gelu_operator).call(input)
    return found


@native
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate times up, as Llama's layers have it, forward and backward in one pass each.

    gate: any shape; float32, float64, float16 or bfloat16. up: of its shape and dtype; under autocast both
        become of the wider dtype.

    Returns y, of the shape and dtype of gate. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = gate / (1 + exp(-gate)) * up. Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _gated_unit("swiglu", gate, up, "silu")


@native
def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """Gelu of the gate times up, as Gemma's layers have it, forward and backward in one pass each.

    gate, up: as for swiglu. approximate: "tanh", or "none" for gelu itself.

    Returns y, of the shape and dtype of gate. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = gelu(gate) * up. Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: approximate is {approximate!r}, expected 'none' or 'tanh'")
    return _gated_unit("geglu", gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _gated_unit(name: str, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if is_torchs(gate):
        return _gated({"gate": gate, "up": up, "activation": activation})
    gate, up = widest(gate, up)
    try:
        found: Tensor = _gated_operator.call(gate, up, activation)
        return found
    except ERRORS as error:
        raise in_words(error, {"gated_linear_unit": name}) from None


@native
def layer_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Layer normalization over the last axes.

    input: shape (…, *normalized_shape); float32, float64, float16 or bfloat16.
    weight, bias: of shape normalized_shape; None: 1 and 0. Those of another dtype than input are computed with as they
        are, and the result is rounded to that of input.
    eps: added to the variance.

    Returns y, of the shape and dtype of input. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias. Source: torch.nn.functional.layer_norm.
    """
    shape = _shape("layer_norm", input, normalized_shape)
    if is_torchs(input):
        return functional.layer_norm(input, shape, weight, bias, eps)
    scale = input.new_ones(shape) if weight is None else weight
    if bias is not None:
        scale, bias = widest(scale, bias)
    x = input if scale.dtype == input.dtype else input.to(scale.dtype)
    return _in_words("layer_norm", _layer_norm, (x, scale, bias, -len(shape), eps)).to(input.dtype)


@native
def rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Root mean square normalization over the last axes.

    input: shape (…, *normalized_shape); float32, float64, float16 or bfloat16.
    weight: of shape normalized_shape; None: 1. One of another dtype than input is computed with as it is.
    eps: added to the mean square; None: the distance of 1 and the next number in the dtype that is computed in,
        float32 for half precision.

    Returns y, of the shape and dtype of input. Differentiable twice. Raises TypeError, ValueError.

    Formula: y = x / sqrt(mean(x * x) + eps) * weight. Source: torch.nn.functional.rms_norm.
    """
    shape = _shape("rms_norm", input, normalized_shape)
    eps = torch.finfo(wide(input.dtype)).eps if eps is None else eps
    if is_torchs(input):
        return functional.rms_norm(input, shape, weight, eps)
    scale = input.new_ones(shape) if weight is None else weight
    x = input if scale.dtype == input.dtype else input.to(scale.dtype)
    return _in_words("rms_norm", _rms_norm, (x, scale, -len(shape), eps)).to(input.dtype)


def _shape(name: str, x: Tensor, normalized_shape: int | Sequence[int]) -> list[int]:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not is_torchs(x) and (not shape or list(x.shape[-len(shape) :]) != shape):
        raise ValueError(f"{name}: input has shape {tuple(x.shape)}, expected {tuple(shape)} as its last axes")
    return shape


def _in_words(name: str, operator: TensorOperator, arguments: Sequence[Any]) -> Tensor:
    """The first result of a normalization; errors speak of the function and its arguments."""
    words = {operator.op.name: name, "x": "input", "scale": "weight"}
    try:
        found: Tensor = operator.call(*arguments)[0]
        return found
    except ERRORS as error:
        raise in_words(error, words) from None


@native
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop elements at random, and scale the others up.

    input: any shape; float32, float64, float16 or bfloat16.
    p: the probability of being dropped, 0 to 1, by decisions that a seed of PyTorch's generator gives.
    training: False gives input itself. inplace: write y to input, and return it.

    Returns y, of the shape and dtype of input; the gradient keeps a byte for each element. Differentiable twice. Raises
    TypeError, ValueError.

    Formula: y = input / (1 - p) where kept, else 0. Source: torch.nn.functional.dropout.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p is {p}, expected 0 to 1")
    if is_torchs(input) or not training or not p:
        return functional.dropout(input, p, training, inplace)
    y: Tensor = _dropout.call(input, torch.randint(SEEDS, (1,), device=input.device), p, True)[0]
    return input.copy_(y) if inplace else y


@native
def sink_softmax(x: Tensor, sink: Tensor) -> Tensor:
    """Softmax of the last axis beside a logit of each head that takes a share and has no place in the result.

    x: scores, shape (N, H, L, S); float32, float64, float16 or bfloat16. sink: shape (H,), of its dtype or float32.

    Returns y, of the shape and dtype of x, float32 for half precision under autocast. Differentiable.
    Raises TypeError, ValueError.

    Formula: y = exp(x) / (sum(exp(x)) + exp(sink)). Source: gpt-oss; Xiao et al., "Efficient Streaming Language Models
    with Attention Sinks", 2023.
    """
    x, sink = (each.float() if widens_softmax(each) else each for each in (x, sink))
    if is_torchs(x):
        return _with_sink(x, sink)[0]
    found: Tensor = _sink_softmax.call(x, sink)[0]
    return found

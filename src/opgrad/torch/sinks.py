"""Softmax with a sink on tensors, by opgrad's CPU kernels, with the derivatives of its value and of its gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opgrad.call.libraries.torch_calls import native
from opgrad.torch.autocast import widens_softmax
from opgrad.torch.batching import batching
from opgrad.torch.formulas import Gradients, wide
from opgrad.torch.layers import Values, along_tangents, is_torchs, one_by_one, registered
from opgrad.torch.operators import TensorOperator

torch_func: Any = torch.func


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
    forward, backward = registered("sink_softmax"), registered("sink_softmax_grad")
    arrays = backward.names

    def gradient(dy: Tensor | None, dlse: Tensor | None, y: Tensor, lse: Tensor, sink: Tensor) -> Gradients:
        dx, dsink = backward.call(torch.zeros_like(y) if dy is None else dy, y, lse, sink)
        if dlse is not None:
            dx = dx + (dlse.unsqueeze(-1) * y).to(dx.dtype)
            dsink = dsink + (dlse * (sink.to(lse.dtype).unsqueeze(1) - lse).exp()).sum((0, 2)).to(dsink.dtype)
        return {"x": dx, "sink": dsink}

    def of_gradient(
        ddx: Tensor | None, ddsink: Tensor | None, dy: Tensor, y: Tensor, lse: Tensor, sink: Tensor
    ) -> Gradients:
        made, pull = torch_func.vjp(_with_sink_back, dy, y, lse, sink)
        pairs = zip((ddx, ddsink), made, strict=True)
        slopes = pull(tuple(torch.zeros_like(b) if a is None else a.to(b.dtype) for a, b in pairs))
        return dict(zip(arrays, slopes, strict=True))

    def along(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
        def tangent(tangents: Mapping[str, Tensor], values: Values) -> Any:
            primals = [values[each] for each in names]
            return along_tangents(
                function, primals, [tangents.get(each, torch.zeros_like(values[each])) for each in names]
            )

        return tangent

    forward.differentiate(gradient)
    backward.differentiate(of_gradient)
    forward.derivative.tangent = along(_with_sink, ("x", "sink"))
    backward.derivative.tangent = along(_with_sink_back, arrays)
    for each in (forward, backward):
        each.derivative.batching = batching(each, one_by_one)
    return forward


_sink_softmax = _sinks()


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

"""Softmax with a sink on tensors, by opgrad's CPU kernels, with the derivatives of its value and of its gradient."""

import torch
from torch import Tensor

from opgrad.call.libraries.torch_calls import native
from opgrad.torch.autocast import widens_softmax
from opgrad.torch.derivative import wide
from opgrad.torch.formulas import Gradients, differentiate
from opgrad.torch.layers import is_torchs, registered
from opgrad.torch.operators import TensorOperator


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

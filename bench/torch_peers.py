"""PyTorch beside opgrad: how each operator is set up, in either way, and what torch.compile makes of that."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.case import Case, GraphCase
from bench.graph_arrays import ARRAYS
from bench.graph_layers import LAYERS
from bench.measure import NEW, Call
from bench.torch_tensors import Setups, Torch, Traced, compiled, direct

AND_GRAD = "softmax_cross_entropy_loss_and_grad"
MEAN, IGNORE_INDEX = 1, -100  # how aten's losses reduce, and the label that they leave out
SIGMOIDS = 1.702  # QuickGelu's alpha


def _loss(t: Torch) -> Call:
    log_softmax = t.into("log_softmax", "logits", 1, out="log_prob")
    nll_loss, labels = t.torch.nn.functional.nll_loss, t["labels"]

    def loss() -> object:
        log_prob = log_softmax()
        return nll_loss(log_prob, labels), log_prob

    return loss


def _loss_only(t: Torch) -> Call:
    """One number, for which no memory need be given.

    These tensors need no gradient, so nothing is kept for one; entering no_grad at each call would cost 4 µs.
    """
    return partial(t.torch.nn.functional.cross_entropy, t["logits"], t["labels"])


def _loss_grad(t: Torch) -> Call:
    return partial(_backward(t, t["dy"], t["log_prob"]), t["log_prob"])


def _backward(t: Torch, dy: Any, like: Any) -> Callable[[Any], Any]:
    """What computes the gradient of the mean loss from log_prob. like: has the shape and dtype of logits."""
    labels, total = t["labels"], like.new_full((), float(t["labels"].numel()))
    name = "aten.nll_loss_backward" if like.ndim == 2 else "aten.nll_loss2d_backward"
    nll = t.into(f"{name}.grad_input", grad_input=t.like("dlogits"))
    log_softmax = t.into("aten._log_softmax_backward_data.out", out="dlogits")

    def backward(log_prob: Any) -> Any:
        gradient = nll(dy, log_prob, labels, None, MEAN, IGNORE_INDEX, total)
        return log_softmax(gradient, log_prob, 1, log_prob.dtype)

    return backward


def _loss_and_grad(t: Torch) -> Call:
    """By autograd, which makes new memory; into memory that is given, by the steps that autograd takes."""
    functional, logits, labels = t.torch.nn.functional, t["logits"], t["labels"]
    if not t.is_given:
        return with_grad(functional.cross_entropy, t)
    kept, backward = t.like("logits"), _backward(t, logits.new_ones(()), logits)

    def loss_and_grad() -> object:
        log_prob = t.torch.log_softmax(logits, 1, out=kept)
        return functional.nll_loss(log_prob, labels), backward(log_prob)

    return loss_and_grad


def with_grad(loss: Callable[[Any, Any], Any], t: Torch) -> Call:
    """A loss and its gradient by autograd."""
    logits, labels, grad = t["logits"].requires_grad_(), t["labels"], t.torch.autograd.grad

    def loss_and_grad() -> object:
        value = loss(logits, labels)
        return value, grad(value, logits)[0]

    return loss_and_grad


def _relu(t: Torch) -> Call:
    return t.into("clamp_min", "x", 0, out="y") if t.is_given else t.into("relu", "x")


def _gather_grad(t: Torch) -> Call:
    """The backward of embedding, or additions into zeros, whichever is faster; only these can be told where."""
    dy, indices, dx = t["dy"], t["indices"], t["dx"]
    if t.is_given:
        return lambda: dx.zero_().index_add_(0, indices, dy)
    embedding = t.into("aten.embedding_dense_backward", dy, indices, len(dx), -1, False)
    if dy.is_cuda:
        return embedding
    return t.fastest(embedding, lambda: t.torch.zeros_like(dx).index_add_(0, indices, dy))


TORCH: Setups = {
    "softmax": direct("softmax", "x", "axis", out="y"),
    "log_softmax": direct("log_softmax", "x", "axis", out="y"),
    "softmax_grad": direct("aten._softmax_backward_data.out", "dy", "y", "axis", "y.dtype", grad_input="dx"),
    "log_softmax_grad": direct("aten._log_softmax_backward_data.out", "dy", "y", "axis", "y.dtype", out="dx"),
    "softmax_cross_entropy_loss": _loss,
    "softmax_cross_entropy_loss_only": _loss_only,
    "softmax_cross_entropy_loss_grad": _loss_grad,
    AND_GRAD: _loss_and_grad,
    "relu": _relu,
    "sigmoid": direct("sigmoid", "x", out="y"),
    "tanh": direct("tanh", "x", out="y"),
    "quick_gelu": direct("aten.silu.out", "x", out="y"),
    "leaky_relu": direct("aten.leaky_relu.out", "x", 0.01, out="y"),
    "relu_grad": direct("aten.threshold_backward.grad_input", "dy", "x", 0, grad_input="dx"),
    "sigmoid_grad": direct("aten.sigmoid_backward.grad_input", "dy", "y", grad_input="dx"),
    "tanh_grad": direct("aten.tanh_backward.grad_input", "dy", "y", grad_input="dx"),
    "quick_gelu_grad": direct("aten.silu_backward.grad_input", "dy", "x", grad_input="dx"),
    "leaky_relu_grad": direct("aten.leaky_relu_backward.grad_input", "dy", "y", 0.01, True, grad_input="dx"),
    "gather": direct("index_select", "x", "axis", "indices", out="y"),
    "gather_grad": _gather_grad,
    "in_place_accumulator": direct("add", "buffer", "value", out="sum"),
    "scale": direct("mul", "x", "factor", out="y"),
}


def call(case: Case, way: str) -> Call | None:
    """The call of torch, if it has the operator and can take the arguments. Raises NoSuchWay."""
    setup = ({**LAYERS, **ARRAYS} if isinstance(case, GraphCase) else TORCH).get(case.op.name)
    return setup(Torch(case, way)) if setup else None


def compiled_call(case: Case, way: str) -> Call | None:
    """torch's call compiled; of the loss with its gradient by autograd the loss, whose gradient is compiled with it."""
    if case.op.name == AND_GRAD and way == NEW:
        return compiled_for([Torch(case, way)])[0]
    eager = call(case, way)
    return eager and compiled(eager)


# --- one compiled function for several arrays -----------------------------------------------------------------------


def _quick_gelu(t: Torch) -> Call:
    return lambda: t["x"] * t.torch.sigmoid(SIGMOIDS * t["x"])


def _quick_gelu_grad(t: Torch) -> Call:
    def backward() -> object:
        gate = t.torch.sigmoid(SIGMOIDS * t["x"])
        return t["dy"] * gate * (1 + SIGMOIDS * t["x"] * (1 - gate))

    return backward


# What users write where the compiler makes one kernel of it, while the eager peer is the nearest single kernel.
EXPRESSIONS: Setups = {**TORCH, "quick_gelu": _quick_gelu, "quick_gelu_grad": _quick_gelu_grad}


def compiled_for(every: Sequence[Torch]) -> list[Call]:
    """The calls of one operator on several arrays of one shape by one compiled function, with results in new memory."""
    first, setup = every[0], EXPRESSIONS[every[0].case.op.name]
    if first.case.op.name == AND_GRAD:
        loss = compiled(first.torch.nn.functional.cross_entropy)
        return [with_grad(loss, t) for t in every]
    names = [name for name in first.case.op.arrays if name in first.values]

    def run(*arrays: Any) -> object:
        made = setup(Traced(first, dict(zip(names, arrays, strict=True))))
        return made and made()

    made = compiled(run)
    return [partial(made, *(t[name] for name in names)) for t in every]

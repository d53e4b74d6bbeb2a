"""PyTorch beside opgrad: how each operator is set up, in either way, and what torch.compile makes of that."""

from collections.abc import Callable
from functools import partial
from typing import Any

from opgrad.bench import composed
from opgrad.bench.case import Case, FormCase, GraphCase
from opgrad.bench.graph_arrays import ARRAYS
from opgrad.bench.graph_layers import LAYERS
from opgrad.bench.torch_tensors import Setups, Torch, compiled, fastest
from opgrad.bench.ways import NEW, Call


def _loss(t: Torch) -> Call:
    log_softmax = t.into(t.torch.log_softmax, t["logits"], 1, out=t["log_prob"])
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
    return partial(_backward(t, t["dy"]), t["log_prob"])


def _backward(t: Torch, dy: Any) -> Callable[[Any], Any]:
    """What computes the gradient of the mean loss from log_prob."""
    labels, logits = t["labels"], t["dlogits"]
    middle, total = t.torch.empty_like(logits), logits.new_tensor(float(labels.numel()))
    name = "nll_loss_backward" if logits.ndim == 2 else "nll_loss2d_backward"
    mean, ignore_index = 1, -100
    nll = t.into(getattr(t.aten, name).grad_input, grad_input=middle)
    log_softmax = t.into(t.aten._log_softmax_backward_data.out, out=t["dlogits"])

    def backward(log_prob: Any) -> Any:
        gradient = nll(dy, log_prob, labels, None, mean, ignore_index, total)
        return log_softmax(gradient, log_prob, 1, log_prob.dtype)

    return backward


def _loss_and_grad(t: Torch) -> Call:
    """By autograd, which makes new memory; into memory that is given, by the steps that autograd takes."""
    cross_entropy, nll_loss = t.torch.nn.functional.cross_entropy, t.torch.nn.functional.nll_loss
    if not t.is_given:
        return with_grad(cross_entropy, t)
    logits, labels = t["logits"], t["labels"]
    kept, backward = t.torch.empty_like(logits), _backward(t, logits.new_ones(()))

    def loss_and_grad() -> object:
        log_prob = t.torch.log_softmax(logits, 1, out=kept)
        return nll_loss(log_prob, labels), backward(log_prob)

    return loss_and_grad


def with_grad(loss: Callable[[Any, Any], Any], t: Torch) -> Call:
    """A loss and its gradient by autograd."""
    logits, labels, grad = t["logits"].requires_grad_(), t["labels"], t.torch.autograd.grad

    def loss_and_grad() -> object:
        value = loss(logits, labels)
        return value, grad(value, logits)[0]

    return loss_and_grad


def _softmax_grad(name: str, result: str) -> Callable[[Torch], Call]:
    def setup(t: Torch) -> Call:
        backward = getattr(t.aten, name).out
        return t.into(backward, t["dy"], t["y"], t.case.axis, t["y"].dtype, **{result: t["dx"]})

    return setup


def _elementwise(name: str, kept: str, *extra: Any) -> Callable[[Torch], Call]:
    """A gradient of aten from dy and what the forward operator kept."""

    def setup(t: Torch) -> Call:
        return t.into(getattr(t.aten, name).grad_input, t["dy"], t[kept], *extra, grad_input=t["dx"])

    return setup


def _gather_grad(t: Torch) -> Call:
    """The backward of embedding, or additions into zeros, whichever is faster; only these can be told where."""
    dy, indices, dx = t["dy"], t["indices"], t["dx"]
    if t.is_given:
        return lambda: dx.zero_().index_add_(0, indices, dy)
    embedding = partial(t.aten.embedding_dense_backward, dy, indices, len(dx), -1, False)
    if dy.is_cuda:
        return embedding
    return fastest(embedding, lambda: t.torch.zeros_like(dx).index_add_(0, indices, dy))


TORCH: Setups = {
    "softmax": lambda t: t.into(t.torch.softmax, t["x"], t.case.axis, out=t["y"]),
    "log_softmax": lambda t: t.into(t.torch.log_softmax, t["x"], t.case.axis, out=t["y"]),
    "softmax_grad": _softmax_grad("_softmax_backward_data", "grad_input"),
    "log_softmax_grad": _softmax_grad("_log_softmax_backward_data", "out"),
    "softmax_cross_entropy_loss": _loss,
    "softmax_cross_entropy_loss_only": _loss_only,
    "softmax_cross_entropy_loss_grad": _loss_grad,
    "softmax_cross_entropy_loss_and_grad": _loss_and_grad,
    "relu": lambda t: t.into(t.torch.clamp_min, t["x"], 0, out=t["y"]) if t.is_given else partial(t.torch.relu, t["x"]),
    "sigmoid": lambda t: t.into(t.torch.sigmoid, t["x"], out=t["y"]),
    "tanh": lambda t: t.into(t.torch.tanh, t["x"], out=t["y"]),
    "quick_gelu": lambda t: t.into(t.aten.silu.out, t["x"], out=t["y"]),
    "leaky_relu": lambda t: t.into(t.aten.leaky_relu.out, t["x"], 0.01, out=t["y"]),
    "relu_grad": _elementwise("threshold_backward", "x", 0),
    "sigmoid_grad": _elementwise("sigmoid_backward", "y"),
    "tanh_grad": _elementwise("tanh_backward", "y"),
    "quick_gelu_grad": _elementwise("silu_backward", "x"),
    "leaky_relu_grad": _elementwise("leaky_relu_backward", "y", 0.01, True),
    "gather": lambda t: t.into(t.torch.index_select, t["x"], t.case.axis, t["indices"], out=t["y"]),
    "gather_grad": _gather_grad,
    "in_place_accumulator": lambda t: t.into(t.torch.add, t["buffer"], t["value"], out=t["sum"]),
    "scale": lambda t: t.into(t.torch.mul, t["x"], t["factor"], out=t["y"]),
}


GRAPH_OPERATORS: Setups = {**LAYERS, **ARRAYS}


def call(case: Case, way: str) -> Call | None:
    """The call of torch, if it has the operator and can take the arguments. Raises NoSuchWay."""
    if isinstance(case, FormCase):
        return composed.call(case, Torch(case, way))
    setup = (GRAPH_OPERATORS if isinstance(case, GraphCase) else TORCH).get(case.op.name)
    return setup(Torch(case, way)) if setup else None


def compiled_call(case: Case, way: str) -> Call | None:
    """torch's call compiled; of the loss with its gradient by autograd the loss, whose gradient is compiled with it."""
    if case.op.name == "softmax_cross_entropy_loss_and_grad" and way == NEW:
        t = Torch(case, way)
        t.torch.compiler.reset()
        loss = t.torch.nn.functional.cross_entropy
        return with_grad(t.torch.compile(lambda x, labels: loss(x, labels), dynamic=False, fullgraph=True), t)
    eager = call(case, way)
    return eager and compiled(eager)

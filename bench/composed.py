"""Forms of softmax composed of torch's own operations, which work in place where they can."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.case import FormCase
from bench.measure import Call
from bench.torch_tensors import Torch
from opgrad.ops.reference.post_ops import PostOp

LOWEST = float("-inf")


def call(case: FormCase, t: Torch) -> Call:
    """The call of torch that a form is compared with. t: the case in torch."""
    chain = _Chain(case, t)
    return chain.gradient() if case.op.forward else chain.forward


class _Chain:
    """The operations of one form, with the tensors that they need."""

    def __init__(self, case: FormCase, t: Torch):
        torch = t.torch
        self.t, self.torch, self.values = t, torch, case.values
        self.axis = case.axis
        self.computed = torch.float64 if case.dtype == "float64" else torch.float32
        where = case.values.get("where")
        self.left_out = None if where is None else torch.from_numpy(~where)
        self.post_ops: tuple[PostOp, ...] = case.values.get("post_ops", ())
        self.operands = [[torch.from_numpy(np.asarray(each)) for each in op.operands] for op in self.post_ops]
        if not case.op.forward:
            x, y = t["x"], t["y"]
            self.same = x.dtype == y.dtype and x.is_floating_point()
            middle = y if self.same else torch.empty(x.shape, dtype=self.computed)
            self.softmax = t.into("softmax", dim=self.axis, out=middle)
            self.logsumexp = t.into("logsumexp", dim=self.axis, keepdim=True, out="stats")

    def forward(self) -> Any:
        """Softmax into the result, or into a buffer if the dtypes differ; the rest in place; what is left converted."""
        x, y = self._logits(), self.t["y"]
        kept = self.logsumexp(x) if "stats" in self.t.results else None
        v, mask = self._after(self.softmax(x))
        if not self.same:
            v = v if y.is_floating_point() else self._rounded(v)
            v = y.copy_(v) if self.t.is_given else v.to(y.dtype)
        return tuple(each for each in (v, mask, kept) if each is not None)

    def _logits(self) -> Any:
        x = self.t["x"] if self.same else self.t["x"].to(self.computed)
        if "logit_scale" in self.values:
            x = x * self.values["logit_scale"]
        return x if self.left_out is None else x.masked_fill(self.left_out, LOWEST)

    def _after(self, v: Any) -> tuple[Any, Any]:
        """What is done to the probabilities, and the mask of what dropout kept, where it is asked for."""
        torch, values, mask = self.torch, self.values, None
        if "result_scale" in values:
            v = v.mul_(values["result_scale"])
        if "mask" in self.t.results:
            v, mask = torch.native_dropout(v, values["dropout"].probability, True)
            if self.t.is_given:
                self.t["mask"].copy_(mask)
        elif "dropout" in values:
            v = torch.nn.functional.dropout(v, values["dropout"].probability, inplace=True)
        for op, operands in zip(self.post_ops, self.operands, strict=True):
            v = OPERATIONS[op.name](torch, op, v, *operands)
        return v.mul_(1 / values["out_scale"]) if "out_scale" in values else v, mask

    def _rounded(self, v: Any) -> Any:
        limits = self.torch.iinfo(self.t["y"].dtype)
        return v.round_().clamp_(limits.min, limits.max)

    def gradient(self) -> Call:
        """Backward of torch, through a graph that stands ready; the plain gradient by its own function."""
        torch, t = self.torch, self.t
        dy, y, dx = t["dy"], t["y"], t["dx"]
        if "post_ops" not in self.values:
            backward = "aten._softmax_backward_data.out"
            if dy.dtype == y.dtype == dx.dtype:
                return t.into(backward, dy, y, self.axis, dy.dtype, grad_input=dx)
            computed = t.into(backward, grad_input=torch.empty(dx.shape))
            return lambda: self._stored(computed(dy.float(), y.float(), self.axis, torch.float32))
        x = torch.log(y.float()).to(y.dtype).requires_grad_()
        v, _ = self._after(torch.softmax(x, self.axis).clone())
        return lambda: self._stored(torch.autograd.grad(v, x, dy, retain_graph=True)[0])

    def _stored(self, gradient: Any) -> Any:
        """The gradient where it belongs, in the dtype that it has there."""
        dx = self.t["dx"]
        return dx.copy_(gradient) if self.t.is_given else gradient.to(dx.dtype)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda torch, op, v, t: v.add_(t),
    "mul": lambda torch, op, v, t: v.mul_(t),
    "relu": lambda torch, op, v: v.relu_(),
    "linear": lambda torch, op, v: v.mul_(op.alpha).add_(op.beta),
    "gelu_erf": lambda torch, op, v: torch.ops.aten.gelu_(v),
}

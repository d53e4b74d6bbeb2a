"""Forms of softmax composed of torch's own operations, which work in place where they can."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from opgrad.bench.form_case import FormCase
from opgrad.post_ops import PostOp

Call = Callable[[], object]
LOWEST = float("-inf")


def call(torch: Any, case: FormCase, tensors: Mapping[str, Any]) -> Call:
    """The call of torch that a form is compared with.

    tensors: the case's arrays by name, in the same memory.
    """
    chain = _Chain(torch, case, tensors)
    return chain.gradient() if case.op.forward else chain.forward


class _Chain:
    """The operations of one form, with the tensors that they need."""

    def __init__(self, torch: Any, case: FormCase, tensors: Mapping[str, Any]):
        self.torch, self.case, self.tensors, self.values = torch, case, tensors, case.values
        self.axis = case.axis
        self.computed = torch.float64 if case.dtype == "float64" else torch.float32
        where = case.values.get("where")
        self.left_out = None if where is None else torch.from_numpy(~where)
        self.operands = [[torch.from_numpy(np.asarray(t)) for t in op.operands] for op in self._post_ops]
        if not case.op.forward:
            x, y = tensors["x"], tensors["y"]
            self.same = x.dtype == y.dtype and x.is_floating_point()
            self.middle = y if self.same else torch.empty(x.shape, dtype=self.computed)

    @property
    def _post_ops(self) -> tuple[PostOp, ...]:
        found: tuple[PostOp, ...] = self.values.get("post_ops", ())
        return found

    def forward(self) -> Any:
        """Softmax into the result, or into a buffer if the dtypes differ; the rest in place; what is left converted."""
        torch, x, y = self.torch, self._logits(), self.tensors["y"]
        if "stats" in self.tensors:
            torch.logsumexp(x, self.axis, keepdim=True, out=self.tensors["stats"])
        v = torch.softmax(x, self.axis, out=self.middle)
        v = self._after(v)
        if self.same:
            return v
        return y.copy_(v if y.is_floating_point() else self._rounded(v))

    def _logits(self) -> Any:
        x = self.tensors["x"] if self.same else self.tensors["x"].to(self.computed)
        if "logit_scale" in self.values:
            x = x * self.values["logit_scale"]
        return x if self.left_out is None else x.masked_fill(self.left_out, LOWEST)

    def _after(self, v: Any) -> Any:
        """What is done to the probabilities."""
        torch, values = self.torch, self.values
        if "result_scale" in values:
            v = v.mul_(values["result_scale"])
        if "mask" in self.tensors:
            v, mask = torch.native_dropout(v, values["dropout"].probability, True)
            self.tensors["mask"].copy_(mask)
        elif "dropout" in values:
            v = torch.nn.functional.dropout(v, values["dropout"].probability, inplace=True)
        for op, operands in zip(self._post_ops, self.operands, strict=True):
            v = OPERATIONS[op.name](torch, op, v, *operands)
        return v.mul_(1 / values["out_scale"]) if "out_scale" in values else v

    def _rounded(self, v: Any) -> Any:
        limits = self.torch.iinfo(self.tensors["y"].dtype)
        return v.round_().clamp_(limits.min, limits.max)

    def gradient(self) -> Call:
        """Backward of torch, through a graph that stands ready; the plain gradient by its own function."""
        torch, tensors = self.torch, self.tensors
        dy, y, dx = tensors["dy"], tensors["y"], tensors["dx"]
        if "post_ops" not in self.values:
            backward, computed = torch.ops.aten._softmax_backward_data.out, torch.empty(dx.shape)
            if dy.dtype == y.dtype == dx.dtype:
                return partial(backward, dy, y, self.axis, dy.dtype, grad_input=dx)
            return lambda: dx.copy_(backward(dy.float(), y.float(), self.axis, torch.float32, grad_input=computed))
        x = torch.log(y.float()).to(y.dtype).requires_grad_()
        v = self._after(torch.softmax(x, self.axis).clone())
        return lambda: dx.copy_(torch.autograd.grad(v, x, dy, retain_graph=True)[0])


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda torch, op, v, t: v.add_(t),
    "mul": lambda torch, op, v, t: v.mul_(t),
    "relu": lambda torch, op, v: v.relu_(),
    "linear": lambda torch, op, v: v.mul_(op.alpha).add_(op.beta),
    "gelu_erf": lambda torch, op, v: torch.ops.aten.gelu_(v),
}

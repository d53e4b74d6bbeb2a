"""Optimizers: blocks that make an optimizer model of the parameters that it is to change."""

from collections.abc import Callable, Sequence
from typing import Any

from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError, ArgumentTypeError
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.training.make.blocks.accessor import current, type_name
from opgrad.training.make.blocks.block import Block, ForwardBlock
from opgrad.training.make.blocks.operators import append
from opgrad.training.make.blocks.targets import positive

__all__ = ["SGD", "AdamW", "ClipGradNorm"]

Parameters = tuple[Sequence[TensorProto], Sequence[TensorProto]]


class ClipGradNorm(Block):
    """All gradients scaled down so that their norm is at most this. max_norm: above 0."""

    def __init__(self, max_norm: float):
        self._max_norm = positive("max_norm", max_norm)

    def build(self, gradients_name: str) -> str:
        """Append the node; the name is that of a sequence of gradients."""
        output, max_norm = "clip_grad_norm_output", float(self._max_norm)
        return append("InplaceClipGradNorm", [gradients_name], output, domain=MICROSOFT, max_norm=max_norm)


class _Optimizer(ForwardBlock):
    """An optimizer of all trainable parameters. clip_grad: a block for the gradients, such as ClipGradNorm."""

    _MOMENTS: Sequence[str] = ("first_order_moments",)

    def __init__(self, clip_grad: Callable[[str], str] | None = None):
        if clip_grad is not None and not callable(clip_grad):
            raise ArgumentTypeError("clip_grad", f"is {clip_grad!r}, expected a block such as ClipGradNorm")
        self._clip_grad = clip_grad

    def build(self, parameters: Parameters) -> str:
        """Append inputs and nodes.

        parameters: the trainable and the frozen ones, as `TrainingBlock.parameters` gives them.
        Raises ValueError if none is trainable, or if they are not all of one type.
        """
        kinds = {each.data_type for each in parameters[0]}
        if not kinds:
            raise ValueError(f"{self._who}: no parameter is trainable, expected one at least")
        if len(kinds) > 1:
            names = " and ".join(sorted(map(type_name, kinds)))
            raise ValueError(f"{self._who}: the trainable parameters have elements of types {names}, expected one type")
        kind, accessor = kinds.pop(), current()
        accessor.input("learning_rate", TensorProto.FLOAT, [1])
        accessor.input("step", TensorProto.INT64, [1])
        for name in ("params", "gradients", *self._MOMENTS):
            accessor.model.graph.input.append(helper.make_tensor_sequence_value_info(name, kind, None))
        flag = self._update("gradients" if self._clip_grad is None else self._clip_grad("gradients"))
        accessor.model.graph.output.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, [1]))
        return flag

    def _update(self, gradients: str) -> str:
        """Append the optimizer's node, and return the name of its result."""
        raise NotImplementedError


class AdamW(_Optimizer):
    """AdamW (Loshchilov, Hutter, 2019).

    bias_correction: whether the moments' start at 0 is made up for. betas: the decay rates of the moments, from 0 to
    below 1. eps: what keeps the denominator from 0. weight_decay: of the parameters, times the learning rate.
    adam_mode: 1 is the order of operations of Hugging Face, 0 that of PyTorch.
    clip_grad: a block for the gradients, such as ClipGradNorm(1.0).
    """

    _MOMENTS = ("first_order_moments", "second_order_moments")

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: Any = None,
        adam_mode: int = 1,
    ):
        super().__init__(clip_grad)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ArgumentError("betas", f"is {betas!r}, expected two numbers from 0 to below 1")
        for name, value in (("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ArgumentError(name, f"is {value!r}, expected 0 or above")
        if adam_mode not in (0, 1) or (adam_mode == 0 and not bias_correction):
            raise ArgumentError("adam_mode", f"is {adam_mode!r}, expected 1, or 0 with bias_correction")
        self._attributes: dict[str, Any] = {
            "alpha": float(betas[0]), "beta": float(betas[1]), "epsilon": float(eps),
            "weight_decay": float(weight_decay), "correct_bias": int(bias_correction), "adam_mode": adam_mode,
        }  # fmt: skip

    def _update(self, gradients: str) -> str:
        inputs = ["learning_rate", "step", "params", gradients, *self._MOMENTS]
        return append("AdamWOptimizer", inputs, "adamw.updated_flag", domain=MICROSOFT, **self._attributes)


class SGD(_Optimizer):
    """Gradient descent. clip_grad: a block for the gradients, such as ClipGradNorm(1.0)."""

    def _update(self, gradients: str) -> str:
        inputs = ["learning_rate", "params", gradients]
        return append("SGDOptimizerV2", inputs, "update_completed", domain=MICROSOFT)

"""Optimizers: blocks that make an optimizer model of the parameters that it is to change."""

from collections.abc import Callable, Sequence
from typing import Any

from onnx import TensorProto, helper

from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.training.make.blocks.accessor import current, type_name
from opgrad.training.make.blocks.block import Block, ForwardBlock
from opgrad.training.make.blocks.operators import append
from opgrad.training.make.blocks.targets import positive

__all__ = ["SGD", "AdamW", "AdamWOptimizer", "ClipGradNorm", "SGDOptimizer"]

Parameters = tuple[Sequence[TensorProto], Sequence[TensorProto]]


class ClipGradNorm(Block):
    """All gradients scaled down so that their norm is at most this. max_norm: above 0."""

    def __init__(self, max_norm: float):
        super().__init__()
        self._max_norm = positive("ClipGradNorm", "max_norm", max_norm)

    def build(self, gradients_name: str) -> str:
        """Append the node; the name is that of a sequence of gradients."""
        output, max_norm = "clip_grad_norm_output", float(self._max_norm)
        return append("InplaceClipGradNorm", [gradients_name], output, domain=MICROSOFT, max_norm=max_norm)


class SGDOptimizer(Block):
    """The node of gradient descent."""

    def build(self, learning_rate_name: str, params_name: str, gradients_name: str) -> str:
        """Append the node; parameters and gradients are sequences."""
        inputs = [learning_rate_name, params_name, gradients_name]
        return append("SGDOptimizerV2", inputs, "update_completed", domain=MICROSOFT)


class AdamWOptimizer(Block):
    """The node of AdamW.

    bias_correction: whether the moments' start at 0 is made up for. betas: the decay rates of the moments, from 0 to
    below 1. eps: what keeps the denominator from 0. weight_decay: of the parameters, times the learning rate.
    adam_mode: 1 is the order of operations of Hugging Face, 0 that of PyTorch.
    """

    def __init__(
        self,
        bias_correction: bool | None = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = 1e-6,
        weight_decay: float | None = 0.0,
        adam_mode: int = 1,
    ):
        super().__init__()
        self._attributes = _adamw_attributes(bias_correction, betas, eps, weight_decay, adam_mode)

    def build(
        self,
        learning_rate_name: str,
        step_name: str,
        parameter_sequence_name: str,
        gradient_sequence_name: str,
        first_order_moment_sequence_name: str,
        second_order_moment_sequence_name: str,
    ) -> str:
        """Append the node."""
        inputs = [
            learning_rate_name, step_name, parameter_sequence_name, gradient_sequence_name,
            first_order_moment_sequence_name, second_order_moment_sequence_name,
        ]  # fmt: skip
        return append("AdamWOptimizer", inputs, "adamw.updated_flag", domain=MICROSOFT, **self._attributes)


def _adamw_attributes(
    bias_correction: bool | None, betas: Sequence[float], eps: float | None, weight_decay: float | None, adam_mode: int
) -> dict[str, Any]:
    """The attributes of the node. Raises ValueError for numbers that have no meaning."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"AdamW: betas is {betas!r}, expected two numbers from 0 to below 1")
    if eps is not None and not eps >= 0:
        raise ValueError(f"AdamW: eps is {eps!r}, expected 0 or above")
    if weight_decay is not None and not weight_decay >= 0:
        raise ValueError(f"AdamW: weight_decay is {weight_decay!r}, expected 0 or above")
    if adam_mode not in (0, 1) or (adam_mode == 0 and not bias_correction):
        raise ValueError(f"AdamW: adam_mode is {adam_mode!r}, expected 1, or 0 with bias_correction")
    given = {
        "alpha": float(betas[0]), "beta": float(betas[1]), "epsilon": eps, "weight_decay": weight_decay,
        "correct_bias": None if bias_correction is None else int(bias_correction), "adam_mode": adam_mode,
    }  # fmt: skip
    floats = ("epsilon", "weight_decay")
    return {name: float(value) if name in floats else value for name, value in given.items() if value is not None}


class _Optimizer(ForwardBlock):
    """An optimizer of all trainable parameters. clip_grad: a block for the gradients, such as ClipGradNorm."""

    MOMENTS: Sequence[str] = ("first_order_moments",)

    def __init__(self, clip_grad: Callable[[str], str] | None = None):
        super().__init__()
        if clip_grad is not None and not callable(clip_grad):
            raise TypeError(f"{type(self).__name__}: clip_grad is {clip_grad!r}, expected a block such as ClipGradNorm")
        self._clip_grad = clip_grad

    def build(self, parameters: Parameters) -> str:
        """Append inputs and nodes.

        parameters: the trainable and the frozen ones, as `TrainingBlock.parameters` gives them.
        Raises ValueError if none is trainable, or if they are not all of one type.
        """
        kind, accessor = _common_type(parameters, type(self).__name__), current()
        accessor.input("learning_rate", TensorProto.FLOAT, [1])
        accessor.input("step", TensorProto.INT64, [1])
        for name in ("params", "gradients", *self.MOMENTS):
            accessor.model.graph.input.append(helper.make_tensor_sequence_value_info(name, kind, None))
        flag = self._update("gradients" if self._clip_grad is None else self._clip_grad("gradients"))
        accessor.model.graph.output.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, [1]))
        return flag

    def _update(self, gradients: str) -> str:
        """Append the optimizer's node, and return the name of its result."""
        raise NotImplementedError


def _common_type(parameters: Parameters, who: str) -> int:
    kinds = {each.data_type for each in parameters[0]}
    if not kinds:
        raise ValueError(f"{who}: no parameter is trainable, expected one at least")
    if len(kinds) > 1:
        names = " and ".join(sorted(map(type_name, kinds)))
        raise ValueError(f"{who}: the trainable parameters have elements of types {names}, expected one type")
    return kinds.pop()


class AdamW(_Optimizer):
    """AdamW (Loshchilov, Hutter, 2019).

    bias_correction, betas, eps, weight_decay, adam_mode: as for AdamWOptimizer.
    clip_grad: a block for the gradients, such as ClipGradNorm(1.0).
    """

    MOMENTS = ("first_order_moments", "second_order_moments")

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
        self._node = AdamWOptimizer(bias_correction, betas, eps, weight_decay, adam_mode)

    def _update(self, gradients: str) -> str:
        return str(self._node("learning_rate", "step", "params", gradients, *self.MOMENTS))


class SGD(_Optimizer):
    """Gradient descent. clip_grad: a block for the gradients, such as ClipGradNorm(1.0)."""

    def __init__(self, clip_grad: Any = None):
        super().__init__(clip_grad)
        self._node = SGDOptimizer()

    def _update(self, gradients: str) -> str:
        return str(self._node("learning_rate", "params", gradients))

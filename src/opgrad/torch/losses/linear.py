"""A linear layer and cross-entropy in one: the logits are never stored as a whole.

An eager call whose loss is one number computes the gradients in the forward pass, while the logits exist, and returns
them in the backward pass. All other calls use two registered operators: one for the samples' results, and one for the
gradients of the layer, which computes the logits again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_tensors import PLAIN
from opgrad.ops.reference.loss_options import IGNORED, LossOptions
from opgrad.torch.autocast import autocast_layer, narrows_products
from opgrad.torch.losses.chunks import chunks_of, gradients
from opgrad.torch.losses.layer_operators import NAME, count_flops, layer_of, layer_statistics, put_back
from opgrad.torch.losses.logits import of_options as of_logits
from opgrad.torch.losses.options import (
    check_dense,
    check_labels,
    check_shape,
    check_target,
    check_tensors,
    check_weight,
    is_class_sharded,
    read_labels,
    read_options,
)
from opgrad.torch.losses.reduced import Found, OnePass, reduced, same_for_each, shaped, upstream_of
from opgrad.torch.losses.statistics import ClassPart, samples_of_parts
from opgrad.torch.operators import is_exported
from opgrad.torch.schema import is_recording


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, options: Any = None, lse_square_scale: float = 0.0, softcap: float | None = None,
    temperature: float = 1.0, shift: int = 0, num_items: float | Tensor | None = None, return_z_loss: bool = False,
    return_lse: bool = False, return_log_prob: bool = False, return_entropy: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy of linear(input, linear_weight, linear_bias), whose logits are computed a chunk at a time.

    input: shape (H,), (N, H) or (…, H); float32, float64, float16 or bfloat16.
    linear_weight: shape (C, H), or (C, D1, …, Dk, H) with input of shape (N, H); input's dtype.
    target: classes in [0, C) of shape (), (N,) or (…), or (N, D1, …, Dk); int32, int64 or uint8. Or probabilities of
        the logits' shape, floating-point: the logits are stored for these, and for k > 0.
        DTensors that are sharded along the classes: as by vocab_parallel_linear_cross_entropy.
    linear_bias: shape (C,), or (C, D1, …, Dk); None: none.
    ignore_index: samples with this class have loss and gradient 0, do not count, and their logits are not computed;
        None, as PyTorch has it: -100. On CUDA that waits for their number.
    options: torch.nn.LinearCrossEntropyOptions, whose batch_chunk_size is how many rows a chunk has; None: chosen so
        that peak memory stays close to that of the arguments and their gradients.
    weight, reduction, label_smoothing, lse_square_scale, softcap, temperature, num_items, return_…: as for
        cross_entropy. shift: as there, along the last axis of target.

    Returns the loss, in the dtype of the logits, float32 under autocast; with other results asked for, a
    CrossEntropyOutput. Differentiable any number of times, of which the first needs no logits. Gradients are summed
    over chunks in float32, or float64 for float64, and written once.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, device, option or class.

    Formula: cross_entropy(input @ linear_weight.T + linear_bias, target). Source:
    torch.nn.functional.linear_cross_entropy.
    """
    returned = (return_z_loss, return_lse, return_log_prob, return_entropy, return_token_accuracy,
                return_predicted_tokens)  # fmt: skip
    ignored = IGNORED if ignore_index is None else ignore_index
    numbers = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    chosen = read_options(NAME, reduction, ignored, *numbers, returned=returned)
    if isinstance(target, Tensor) and target.is_floating_point():
        check_dense(NAME, chosen)
    if options is not None and not hasattr(options, "batch_chunk_size"):
        raise TypeError(f"{NAME}: options is {type(options).__name__}, expected torch.nn.LinearCrossEntropyOptions")
    rows = None if options is None else options.batch_chunk_size
    return of_options(input, linear_weight, target, linear_bias, weight, chosen, shift, rows)


def linear_log_prob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    ignore_index: int | None = -100, softcap: float | None = None, temperature: float = 1.0, shift: int = 0,
    return_entropy: bool = False,
) -> Any:  # fmt: skip
    """The log-probability of each target under the softmax of a linear layer, whose logits are never stored.

    input, linear_weight, target, linear_bias, ignore_index, softcap, temperature, shift: as for linear_cross_entropy,
        with classes for target and linear_weight of shape (C, H).
    return_entropy: return the entropy of each row's softmax, too.

    Returns log_prob, or (log_prob, entropy), of the shape of target, in float32 or float64; 0 where target is
    ignore_index. Differentiable any number of times: the first gradient computes the logits again, in chunks.
    Raises what linear_cross_entropy raises.

    Formula: log_prob = z[target] - log(sum(exp(z))); z = softcap * tanh(x / softcap) / temperature, x the logits.
    Source: the log-probabilities of tokens that DPO, GRPO and PPO are of.
    """
    if isinstance(target, Tensor) and target.is_floating_point():
        raise TypeError(f"linear_log_prob: target has dtype {target.dtype}, expected int32, int64 or uint8")
    found = linear_cross_entropy(
        input, linear_weight, target, linear_bias=linear_bias, reduction="sum", ignore_index=ignore_index,
        softcap=softcap, temperature=temperature, shift=shift, return_log_prob=True, return_entropy=return_entropy,
    )  # fmt: skip
    return (found.log_prob, found.entropy) if return_entropy else found.log_prob


def of_options(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    chosen: LossOptions, shift: int = 0, rows: int | None = None,
) -> Any:  # fmt: skip
    """linear_cross_entropy with its options read. rows: of a chunk; None: chosen here."""
    tensors: dict[str, Any] = {"input": input, "linear_weight": linear_weight, "target": target}
    tensors |= {"linear_bias": linear_bias, "weight": weight}
    _check(tensors)
    if is_class_sharded(linear_weight, 0) and linear_weight.dim() == 2:
        from opgrad.torch.losses import dtensors, layer_operators

        call = layer_operators.LossCall(NAME, chosen, weight=weight)
        call.check(input, target)
        return dtensors.linear_loss(call, input, linear_weight, linear_bias, target, shift)
    if target.is_floating_point() or linear_weight.dim() != 2 or not input.numel() or not linear_weight.numel():
        return _by_logits(input, linear_weight, target, linear_bias, weight, chosen, shift)
    labels = read_labels(NAME, target, shift, chosen.ignore_index)
    if needs_composition([each for each in tensors.values() if each is not None]):
        return _by_logits(input, linear_weight, labels, linear_bias, weight, chosen, 0)
    x, w, b, dtype = autocast_layer(input.reshape(-1, input.shape[-1]), linear_weight, linear_bias)
    return _loss(x, w, b, labels, weight, _LayerPass(chosen, chosen.dtype or dtype, rows=rows))


def _check(tensors: dict[str, Any]) -> None:
    check_tensors(NAME, ("linear_bias", "weight"), **tensors)
    x, w, target, weight = (tensors[name] for name in ("input", "linear_weight", "target", "weight"))
    if not x.dim():
        raise ValueError(f"{NAME}: input has 0 dimensions, expected at least 1")
    if w.dim() < 2:
        raise ValueError(f"{NAME}: linear_weight has {w.dim()} dimensions, expected at least 2")
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"{NAME}: input has {x.shape[-1]} features, expected {w.shape[-1]}, those of linear_weight")
    if w.dim() > 2 and x.dim() != 2:
        raise ValueError(f"{NAME}: input has {x.dim()} dimensions, expected 2 beside a linear_weight of {w.dim()}")
    is_dense = target.is_floating_point()
    check_shape(NAME, "target", target, (*x.shape[:-1], *w.shape[0 if is_dense else 1 : -1]))
    check_target(NAME, target)
    check_shape(NAME, "linear_bias", tensors["linear_bias"], w.shape[:-1])
    check_shape(NAME, "weight", weight, w.shape[:1])
    check_weight(NAME, weight)
    for name, value in tensors.items():
        if value is not None and value.device != x.device:
            raise ValueError(f"{NAME}: {name} is on {value.device}, expected {x.device}, the device of input")
        if value is not None and name.startswith("linear_") and value.dtype != x.dtype and not narrows_products(x):
            raise TypeError(f"{NAME}: {name} has dtype {value.dtype}, expected {x.dtype}, the dtype of input")


def needs_composition(tensors: Sequence[Tensor]) -> bool:
    """Whether a transformation is active that must see the operations inside the loss: any of them except grad."""
    if is_recording() or is_exported() or torch_private.is_forward_mode():
        return True
    if torch.compiler.is_compiling():
        return False
    if any(type(each) not in PLAIN and not torch_private.is_wrapped(each) for each in tensors):
        return True
    return not torch_private.are_gradients_alone()


def _by_logits(
    input: Tensor, w: Tensor, target: Tensor, b: Tensor | None, weight: Tensor | None, options: LossOptions, shift: int
) -> Any:
    """The loss of logits that are stored."""
    logits = functional.linear(input, w.flatten(0, -2), None if b is None else b.flatten())
    if w.dim() > 2:
        logits = logits.reshape(*input.shape[:-1], *w.shape[:-1])
    elif logits.dim() > 2:
        logits = logits.movedim(-1, 1)
        target = target.movedim(-1, 1) if target.is_floating_point() else target
    return of_logits(logits, target, weight, options, shift)


# --- the loss of rows ----------------------------------------------------------------------------------------------


def _loss(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, way: "_LayerPass") -> Any:
    """The loss of rows of input; labels, and the fields of samples, have the target's shape."""
    needs = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, w, b))
    one_number = way.options.reduction != "none" and not way.options.returned
    watched = torch.compiler.is_compiling() or torch_private.transforms_active()
    arguments = (x, w, b, labels.reshape(-1), weight)
    if needs and one_number and not watched and not torch_private.dispatch_modes():
        return way(*arguments)[0]
    if not torch.compiler.is_compiling():
        count_flops()
    found = shaped(_samples(way, *arguments), labels.shape)
    return reduced(found, labels, weight, False, way.options, way.dtype)


def _samples(
    way: "_LayerPass", x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None
) -> Sequence[Any]:
    """The results of `sample_losses` for the layer's logits; None for a result that is not wanted."""
    options, part = way.options, ClassPart.of(way.options, weight)
    statistics = layer_statistics(x, w, b, labels, *part, options.ignore_index, way.rows, "").double()
    given = (labels, part, w.shape[0], weight, options, way.dtype, options.label_smoothing)
    return samples_of_parts(statistics.unsqueeze(0), *given)


@dataclass(frozen=True)
class _LayerPass(OnePass):
    """A layer whose logits exist in chunks of `rows` rows. Its tensors are x, w, b, labels and class weights."""

    rows: int | None = None
    hands_out = True

    def compute(self, tensors: Sequence[Any], needs: Sequence[bool]) -> Found:
        x, w, b, labels, weight = tensors
        options, upstream = self.options, upstream_of(labels, weight, False, self.options, x.dtype)
        check_labels(NAME, labels, len(w), options.ignore_index)
        layer, counting = layer_of(x, w, b, labels, weight, options.ignore_index)
        chunks = chunks_of(layer, self.rows, with_gradient=True)
        dloss, squares = same_for_each(layer.labels, upstream.of_loss, layer.number), None
        if options.lse_square_scale:
            squares = same_for_each(layer.labels, upstream.of_square, layer.number)
        loss, lse, (dx, dw, db) = gradients(layer, dloss, squares, options, needs[:3], chunks)
        total = loss.sum(dtype=torch.float64) * upstream.of_loss
        if squares is not None:
            total = total + (lse * lse).sum(dtype=torch.float64) * upstream.of_square
        dx = None if dx is None else put_back(dx, counting, len(x))
        return Found((total * upstream.later).to(self.dtype), [dx, dw, db], upstream.later)

    def differentiable(self, tensors: Sequence[Any]) -> Tensor:
        *_, labels, weight = tensors
        loss: Tensor = reduced(_samples(self, *tensors), labels, weight, False, self.options, self.dtype)
        return loss

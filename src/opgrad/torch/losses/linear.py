"""A linear layer and cross-entropy in one: the logits are never stored as a whole.

An eager call whose loss is one number computes the gradients in the forward pass, while the logits exist, and returns
them in the backward pass. All other calls use two registered operators: one for the samples' results, and one for the
gradients of the layer, which computes the logits again.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_private import group_of
from opgrad.call.libraries.torch_tensors import PLAIN
from opgrad.ops.reference.loss_options import IGNORED, LossOptions
from opgrad.torch.autocast import autocast_layer, narrows_products
from opgrad.torch.derivative import pulled_back, wide
from opgrad.torch.losses.chunks import Layer, chunks_of, gradients, gradients_of_statistics, statistics_of_layer
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
from opgrad.torch.losses.shard_operators import keep_all, kept, once, register, shard_copy
from opgrad.torch.losses.statistics import (
    CLASSES,
    SLOPES,
    ClassPart,
    composed_statistics,
    factors_of_slopes,
    samples_of_parts,
)
from opgrad.torch.operators import is_exported
from opgrad.torch.schema import LIBRARY, TAGS, is_recording

NAME = "linear_cross_entropy"


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
        from opgrad.torch.losses import dtensors, sharded

        call = sharded.LossCall(NAME, chosen, weight=weight)
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
    """What `sample_losses` gives for the layer's logits; None for what is not asked for."""
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


# --- the statistics of a layer, and its gradients, as registered operators --------------------------------------------
#
# The layer may have all classes, or a shard of them: then the gradient of its input is summed over the group.


_LAYER = f"Tensor x, Tensor w, Tensor? b, {CLASSES}, SymInt? ignore_index, SymInt? rows, str group"
LIBRARY.define(f"layer_statistics({_LAYER}) -> Tensor", tags=TAGS)
LIBRARY.define(f"layer_statistics_grad({_LAYER}, {SLOPES}) -> (Tensor, Tensor, Tensor)", tags=TAGS)
layer_statistics: Any = torch.ops.opgrad.layer_statistics.default
layer_statistics_grad: Any = torch.ops.opgrad.layer_statistics_grad.default


def layer_of(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, ignore_index: int | None
) -> tuple[Layer, Tensor | None]:
    """The layer with only the samples that count, and their numbers; None if all count."""
    x, w, b = x.detach(), w.detach(), None if b is None else b.detach()
    kept = counted(labels, ignore_index)
    if kept is not None:
        x, labels = x.index_select(0, kept), labels.index_select(0, kept)
    return Layer(x, w, b, labels, None if weight is None else weight.detach()), kept


def counted(labels: Tensor, ignore_index: int | None) -> Tensor | None:
    """The numbers of the samples that count; None if all count. On CUDA this waits for the device."""
    if ignore_index is None or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    kept = (labels != ignore_index).nonzero().squeeze(1)
    return None if len(kept) == len(labels) else kept


def put_back(found: Tensor, kept: Tensor | None, count: int, axis: int = 0) -> Tensor:
    """What was computed of the samples that count, for all of them along an axis; 0 for the others."""
    if kept is None:
        return found
    shape = (*found.shape[:axis], count, *found.shape[axis + 1 :])
    return found.new_zeros(shape).index_copy_(axis, kept, found)


def _statistics(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, *others: Any) -> Tensor:
    *given, ignore_index, rows, group = others
    if not group:  # the labels of a shard are classes of all of them
        check_labels(NAME, labels, len(w), ignore_index)
    layer, counting = layer_of(x, w, b, labels, weight, ignore_index)
    found = statistics_of_layer(layer, ClassPart(weight, *given), chunks_of(layer, rows, with_gradient=False))
    return put_back(found.to(layer.number), counting, len(x), axis=1)


def _fake(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, *part: Any) -> Tensor:
    count_flops()
    return x.new_empty(ClassPart(*part[:6]).numbers, x.shape[0], dtype=wide(x.dtype))


def _grad(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over chunks, and over the group, are formed in float32."""
    *given, ignore_index, rows, group, statistics, slopes = others
    part = ClassPart(weight, *given)
    layer, counting = layer_of(x, w, b, labels, weight, ignore_index)
    factors = factors_of_slopes(statistics, slopes, part)
    factors = factors if counting is None else factors.index_select(1, counting)
    needs, dx_dtype = (True, True, b is not None), layer.number if group else None
    chunks = chunks_of(layer, rows, with_gradient=True)
    dx, dw, db = gradients_of_statistics(layer, part, factors, needs, chunks, dx_dtype)
    assert dx is not None
    assert dw is not None
    if group:
        dist.all_reduce(dx, group=group_of(group))
    return put_back(dx.to(x.dtype), counting, len(x)), dw, x.new_zeros(0) if db is None else db


def _grad_fake(x: Tensor, w: Tensor, b: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w), x.new_empty(0) if b is None else torch.empty_like(b)


def _backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
    """The first gradient computes the logits again in chunks; for further ones they are stored."""
    x, w, b, *given, statistics = kept(ctx)
    nothing, (labels, *part, _, _, group) = (None,) * len(given), given
    if not torch.is_grad_enabled():
        dx, dw, db = layer_statistics_grad(x, w, b, *given, statistics, slopes)
        return dx, dw, None if b is None else db, *nothing

    def stored(*layer: Tensor) -> Tensor:
        own = shard_copy(layer[0], group) if group else layer[0]
        return composed_statistics(functional.linear(own, *layer[1:]), labels, ClassPart(*part))

    found = pulled_back(stored, [each for each in (x, w, b) if each is not None], [slopes])
    return *found, *(None,) * (3 - len(found)), *nothing


register(layer_statistics, _statistics, _fake, _backward, keep_all)
register(layer_statistics_grad, _grad, _grad_fake, once, keep_all)


# --- floating-point operations ---------------------------------------------------------------------------------------


# The products of each operator; the gradients compute the logits again.
PRODUCTS = {"layer_statistics": 1, "layer_statistics_grad": 3}


def count_flops() -> None:
    """Register the formulas if torch.utils.flop_counter is imported."""
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    registries = [
        getattr(getattr(mode, "counter", None), "flop_registry", None) for mode in torch_private.active_modes()
    ]
    for registry in (getattr(counting, "flop_registry", None), *registries):
        if registry is not None:
            for name, products in PRODUCTS.items():
                registry.setdefault(getattr(torch.ops.opgrad, name), partial(_flops_of, products))


def _flops_of(products: int, x: Any, w: Any, *others: Any, **named: Any) -> int:
    """The floating-point operations of so many products of x [N, H] with w [C, H], tensors or their shapes."""
    (rows, features), (classes, _) = (getattr(each, "shape", each) for each in (x, w))
    return int(2 * products * rows * features * classes)

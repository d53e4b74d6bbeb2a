"""Cross-entropy of logits, of a linear layer, and of classes that are split over the processes of a group.

Of logits the gradient is computed in the forward pass, and log_prob is never stored. Of a linear layer the logits are
never stored as a whole: an eager call whose loss is one number computes the gradients in the forward pass, while the
logits exist; all other calls use two registered operators, one for the samples' results, and one for the gradients of
the layer, which computes the logits again.

With split classes each process computes the statistics of its own for each row, and gathers those of all processes in
one all-gather. It combines them in the order of the ranks, in float64, so that every process has the same bits.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries import torch_private
from opgrad.call.libraries.torch_calls import native, note_effect
from opgrad.call.libraries.torch_tensors import PLAIN, is_traced, is_transformed
from opgrad.ops.reference.loss_options import IGNORED, LossOptions, over
from opgrad.torch.functions import autocast_layer, narrows_products, widens_softmax
from opgrad.torch.losses.samples import (
    Found,
    OnePass,
    check_dense,
    check_labels,
    check_shape,
    check_target,
    check_tensors,
    check_weight,
    composed,
    divisors,
    is_class_sharded,
    losses_and_grad,
    output,
    read_labels,
    read_options,
    reduced,
    same_for_each,
    sample_losses,
    settings,
    shaped,
    upstream_of,
)
from opgrad.torch.losses.sharded import (
    NAME,
    ClassRange,
    LossCall,
    count_flops,
    layer_of,
    layer_statistics,
    member_of,
    of_layer,
    of_logits,
    put_back,
)
from opgrad.torch.losses.statistics import ClassPart, chunks_of, gradients, samples_of_parts
from opgrad.torch.operators import OPERATORS, is_exported, wide, worded
from opgrad.torch.schema import is_recording

CROSS_ENTROPY = "cross_entropy"
_loss_only = OPERATORS["softmax_cross_entropy_loss_only"]
_loss_and_grad = OPERATORS["softmax_cross_entropy_loss_and_grad"]


@native
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    *, lse_square_scale: float = 0.0, softcap: float | None = None, temperature: float = 1.0, shift: int = 0,
    num_items: float | Tensor | None = None, return_z_loss: bool = False, return_lse: bool = False,
    return_log_prob: bool = False, return_entropy: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, inplace_backward: bool = False, check: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy between softmax(input) over the classes and labels or class probabilities.

    input: logits of shape (C,), (N, C) or (N, C, D1, …, Dk); float32, float64, float16 or bfloat16. Any strides.
        A DTensor that is sharded along the classes is computed as by vocab_parallel_cross_entropy.
    target: classes in [0, C), of shape (), (N,) or (N, D1, …, Dk); int32, int64 or uint8. Or probabilities, a
        floating-point tensor of input's shape.
    weight: shape (C,), any of the four dtypes; a factor for the samples of each class; None: all 1.
    size_average, reduce: what PyTorch had for reduction once; None: reduction says it.
    ignore_index: samples with this class have loss and gradient 0 and do not count.
    reduction: "none" (a loss for each sample), "sum", or "mean" (sum divided by the sum of the samples' weights,
        or by the number of samples for probabilities; 0 if that is 0).
    label_smoothing: in [0, 1]; this much of each sample's probability is shared by all classes.
    lse_square_scale: this times the square of each sample's log-sum-exp is added to its loss, without its weight; for
        "mean", divided by the number of samples that count.
    softcap: logits are softcap * tanh(input / softcap); None: input. temperature: they are divided by it then.
    shift: sample i is compared with the target `shift` places behind it on the last axis of target; the last ones
        are ignored.
    num_items: what "mean" divides by; a number, or a tensor with one, which is not waited for; None: what counts.
    return_…: also return fields of CrossEntropyOutput.
    inplace_backward: scale the stored gradient in place and hand it out: one tensor of input's size less in the
        backward pass, which can then run once only. Without effect under torch.compile and torch.func, and where
        the gradient is not stored.
    check: on CUDA, wait for the device and raise for classes out of range instead of giving NaN; the CPU always
        checks.

    Returns the loss, of the samples' shape for "none", else (); in input's dtype, or float32 for half precision
    under autocast; probabilities of a wider dtype, and weight beside them, give theirs. With other results asked for,
    a CrossEntropyOutput. Differentiable twice. With integer classes alone a call that needs a gradient computes it at
    once, and keeps that alone: neither input nor log-probabilities. With options it keeps input, too, for gradients
    of gradients; where other results are differentiable, or for "none", it keeps input instead.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, device, option or class.

    Formula: loss_i = -weight[target_i] * log_softmax(z)[i, target_i] + lse_square_scale * lse_i ** 2, where z are the
    logits. Source: torch.nn.functional.cross_entropy; label smoothing as there.
    """
    if size_average is not None or reduce is not None:
        note_effect()  # every such call warns
        reduction = _reduction(size_average, reduce)
    returned = (return_z_loss, return_lse, return_log_prob, return_entropy, return_token_accuracy,
                return_predicted_tokens)  # fmt: skip
    numbers = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    options = read_options(CROSS_ENTROPY, reduction, ignore_index, *numbers, returned=returned)
    return of_logits_options(input, target, weight, options, shift, inplace_backward, check)


def of_logits_options(
    input: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, shift: int = 0, in_place: bool = False,
    check: bool = False,
) -> Any:  # fmt: skip
    """cross_entropy with checked options."""
    if is_class_sharded(input, min(input.dim() - 1, 1) if isinstance(input, Tensor) else 0):
        from opgrad.torch.losses import dtensors

        call = LossCall(CROSS_ENTROPY, options, weight=weight)
        call.check(input, target)
        return dtensors.loss(call, input, target, min(input.dim() - 1, 1), shift)
    words = SINGLE if isinstance(input, Tensor) and input.dim() == 1 else WORDS
    return worded(words, _cross_entropy, input, target, weight, options, shift, in_place, check)


WORDS = {name: "cross_entropy" for name in OPERATORS if name.startswith("softmax_cross_entropy_loss")}
WORDS |= dict.fromkeys(("sample_losses", "sample_losses_and_grad"), "cross_entropy")
WORDS |= {"logits": "input", "labels": "target"}
SINGLE = {"labels[0]": "target", **WORDS}


def _reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that size_average and reduce stand for; None for one of them stands for True."""
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(
                f"cross_entropy: {name} is {value!r}, expected a bool or None; ignore_index comes behind it"
            )
    reduction = "none" if reduce is False else "mean" if size_average is not False else "sum"
    warnings.warn(f"cross_entropy: size_average and reduce are deprecated, use reduction={reduction!r}", stacklevel=3)
    return reduction


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions, shift: int, in_place: bool, check: bool
) -> Any:
    """The loss, computed in the way that fits its arguments."""
    _check(input, target, weight)
    if input.dim() == 1:
        found = _cross_entropy(input.unsqueeze(0), target.unsqueeze(0), weight, options, shift, in_place, check)
        # The results for a single row of logits, from the results for a batch of one row.
        if isinstance(found, tuple):
            return type(found)(*[each if each is None or not each.dim() else each.squeeze(0) for each in found])
        return found.squeeze(0) if found.dim() else found
    dtype = options.dtype or (torch.float32 if widens_softmax(input) else input.dtype)
    labels = read_labels(CROSS_ENTROPY, target, shift, options.ignore_index)
    if target.is_floating_point():
        check_dense(CROSS_ENTROPY, options)
        dtype = torch.promote_types(dtype, target.dtype)
        dtype = dtype if weight is None else torch.promote_types(dtype, weight.dtype)
        none = torch.zeros(input.shape[:1] + input.shape[2:], dtype=torch.int64, device=input.device)
        return _with_options(input, none, weight, target, _LogitsPass(options, dtype, in_place, check))
    if not options.is_plain:
        return _with_options(input, labels, weight, None, _LogitsPass(options, dtype, in_place, check))
    is_half_mean = options.reduction == "mean" and input.dtype == torch.float16
    if options.num_items is None and not (is_half_mean and _needs_gradient(input) and not is_exported()):
        return _plain(input, labels, weight, options, dtype, in_place, check)
    # If the gradient were divided by the number of samples at once, most of it would underflow float16 before a loss
    # scale could prevent that. So the gradient of the sum is kept, and the factor contains the division.
    summed = replace(options, reduction="sum", num_items=None)
    total = _plain(input, labels, weight, summed, wide(input.dtype), in_place, check)
    by_weight, _ = divisors(labels, weight, False, options)
    return (total.to(torch.float64) * over(torch, by_weight)).to(dtype)


def _needs_gradient(input: Tensor) -> bool:
    """Whether the gradient is computed with the loss; of a recorded module it is computed when it is asked for."""
    return torch.is_grad_enabled() and input.requires_grad and not is_recording()


def _plain(
    input: Tensor, labels: Tensor, weight: Tensor | None, options: LossOptions, dtype: torch.dtype, in_place: bool,
    check: bool,
) -> Tensor:  # fmt: skip
    """The loss of integer classes without options; with its gradient, which is kept, if one is needed."""
    if not _needs_gradient(input):
        return _loss_only(input, labels, weight, options.ignore_index, options.reduction, dtype, check)
    if in_place and not torch.compiler.is_compiling() and not is_transformed():
        return _PlainPass(options, dtype, in_place, check)(input, labels, weight)[0]
    return _PlainPass(options, dtype, check=check).compute((input, labels, weight), ()).loss


@dataclass(frozen=True)
class _PlainPass(OnePass):
    """Integer classes without options, by the operator that computes this loss with its gradient."""

    check: bool = False

    def compute(self, tensors: Sequence[Any], needs: Sequence[bool]) -> Found:
        logits, options = tensors[0], self.options
        settings = (options.ignore_index, options.reduction, self.dtype, logits.dtype, self.check)
        loss, dlogits = _loss_and_grad(*tensors, *settings)
        return Found(loss, [dlogits])


@dataclass(frozen=True)
class _LogitsPass(OnePass):
    """Logits with options. Its tensors are logits, labels, class weights and probabilities; the last may be None."""

    check: bool = False

    def compute(self, tensors: Sequence[Any], needs: Sequence[bool]) -> Found:
        logits, labels, weight, probabilities = tensors
        is_dense, number = probabilities is not None, wide(logits.dtype)
        of_loss, of_square, later = upstream_of(labels, weight, is_dense, self.options, logits.dtype)
        square = same_for_each(labels, of_square, number) if self.options.lse_square_scale else None
        given = (same_for_each(labels, of_loss, number), None, square, None, None)
        *found, dlogits = losses_and_grad.execute(*tensors, *given, *settings(self.options), self.check)
        loss = reduced(found, labels, weight, is_dense, self.options, self.dtype)
        return Found(loss, [dlogits], later, found[4])

    def differentiable(self, tensors: Sequence[Any]) -> Tensor:
        _, labels, weight, probabilities = tensors
        found = sample_losses(*tensors, *settings(self.options), False)
        loss: Tensor = reduced(found, labels, weight, probabilities is not None, self.options, self.dtype)
        return loss


def _with_options(
    logits: Tensor, labels: Tensor, weight: Tensor | None, probabilities: Tensor | None, way: _LogitsPass
) -> Any:
    """The loss, or CrossEntropyOutput, of labels, which all count beside probabilities, with the options of `way`."""
    arguments, options = (logits, labels, weight, probabilities), way.options
    of_logits = _needs_gradient(logits) and (probabilities is None or not probabilities.requires_grad)
    one_number = options.reduction != "none" and not options.is_differentiable_beside
    tensors = [logits] if probabilities is None else [logits, probabilities]
    if of_logits and one_number and not (is_transformed() or is_traced(tensors) or is_exported()):
        loss, predicted = way(*arguments)
        return output(loss, {"predicted_tokens": predicted}, labels, options) if options.returned else loss
    if is_transformed() or is_recording() or is_exported():
        found = composed(*arguments, settings(options), way.check)
    else:
        found = sample_losses(*arguments, *settings(options), way.check)
    return reduced(found, labels, weight, probabilities is not None, options, way.dtype)


def _check(input: Any, target: Any, weight: Any) -> None:
    check_tensors(CROSS_ENTROPY, ("weight",), input=input, target=target, weight=weight)
    if not input.dim():
        raise ValueError(f"{CROSS_ENTROPY}: input has 0 dimensions, expected at least 1")
    if is_recording():
        return  # sizes are tensors there, on which Python must not branch; the operator checks them when it runs
    if target.is_floating_point():
        expected, which = input.shape, "input's shape for class probabilities"
    else:
        expected, which = input.shape[: input.dim() > 1] + input.shape[2:], "input's shape without the classes"
    check_shape(CROSS_ENTROPY, "target", target, expected, which)
    check_shape(CROSS_ENTROPY, "weight", weight, input.shape[min(input.dim() - 1, 1) :][:1], "the classes")
    check_weight(CROSS_ENTROPY, weight)


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
    return of_linear_options(input, linear_weight, target, linear_bias, weight, chosen, shift, rows)


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


def of_linear_options(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    chosen: LossOptions, shift: int = 0, rows: int | None = None,
) -> Any:  # fmt: skip
    """linear_cross_entropy with its options read. rows: of a chunk; None: chosen here."""
    tensors: dict[str, Any] = {"input": input, "linear_weight": linear_weight, "target": target}
    tensors |= {"linear_bias": linear_bias, "weight": weight}
    _check_linear(tensors)
    if is_class_sharded(linear_weight, 0) and linear_weight.dim() == 2:
        from opgrad.torch.losses import dtensors

        call = LossCall(NAME, chosen, weight=weight)
        call.check(input, target)
        return dtensors.linear_loss(call, input, linear_weight, linear_bias, target, shift)
    if target.is_floating_point() or linear_weight.dim() != 2 or not input.numel() or not linear_weight.numel():
        return _by_logits(input, linear_weight, target, linear_bias, weight, chosen, shift)
    labels = read_labels(NAME, target, shift, chosen.ignore_index)
    if needs_composition([each for each in tensors.values() if each is not None]):
        return _by_logits(input, linear_weight, labels, linear_bias, weight, chosen, 0)
    x, w, b, dtype = autocast_layer(input.reshape(-1, input.shape[-1]), linear_weight, linear_bias)
    way, arguments = _LayerPass(chosen, chosen.dtype or dtype, rows=rows), (x, w, b, labels.reshape(-1), weight)
    needs = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, w, b))
    one_number = chosen.reduction != "none" and not chosen.returned
    watched = torch.compiler.is_compiling() or torch_private.transforms_active()
    if needs and one_number and not watched and not torch_private.dispatch_modes():
        return way(*arguments)[0]
    if not torch.compiler.is_compiling():
        count_flops()
    return reduced(shaped(way.samples(*arguments), labels.shape), labels, weight, False, chosen, way.dtype)


def _check_linear(tensors: dict[str, Any]) -> None:
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
    return of_logits_options(logits, target, weight, options, shift)


@dataclass(frozen=True)
class _LayerPass(OnePass):
    """A layer whose logits exist in chunks of `rows` rows. Its tensors are x, w, b, labels and class weights."""

    rows: int | None = None
    hands_out = True

    def compute(self, tensors: Sequence[Any], needs: Sequence[bool]) -> Found:
        x, w, b, labels, weight = tensors
        options = self.options
        of_loss, of_square, later = upstream_of(labels, weight, False, options, x.dtype)
        check_labels(NAME, labels, len(w), options.ignore_index)
        layer, counting = layer_of(x, w, b, labels, weight, options.ignore_index)
        dloss = same_for_each(layer.labels, of_loss, layer.number)
        squares = same_for_each(layer.labels, of_square, layer.number) if options.lse_square_scale else None
        chunks = chunks_of(layer, self.rows, with_gradient=True)
        loss, lse, (dx, dw, db) = gradients(layer, dloss, squares, options, needs[:3], chunks)
        total = loss.sum(dtype=torch.float64) * of_loss
        if squares is not None:
            total = total + (lse * lse).sum(dtype=torch.float64) * of_square
        dx = None if dx is None else put_back(dx, counting, len(x))
        return Found((total * later).to(self.dtype), [dx, dw, db], later)

    def differentiable(self, tensors: Sequence[Any]) -> Tensor:
        *_, labels, weight = tensors
        loss: Tensor = reduced(self.samples(*tensors), labels, weight, False, self.options, self.dtype)
        return loss

    def samples(self, x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, weight: Tensor | None) -> Sequence[Any]:
        """The results of `sample_losses` for the layer's logits; None for a result that is not wanted."""
        options, part = self.options, ClassPart.of(self.options, weight)
        statistics = layer_statistics(x, w, b, labels, *part, options.ignore_index, self.rows, "").double()
        given = (labels, part, w.shape[0], weight, options, self.dtype, options.label_smoothing)
        return samples_of_parts(statistics.unsqueeze(0), *given)


LOGITS, LINEAR = "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"


def vocab_parallel_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, *, group: Any = None, vocab_range: tuple[int, int] | None = None, dim: int = -1,
    smoothing_formula: str = "torch", lse_square_scale: float = 0.0, softcap: float | None = None,
    temperature: float = 1.0, shift: int = 0, num_items: float | Tensor | None = None, return_lse: bool = False,
    return_z_loss: bool = False, return_log_prob: bool = False, return_entropy: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy of logits of which each process of a group has the classes of a range, with one all-gather.

    input: logits of this process's classes, which lie along `dim`; float32, float64, float16 or bfloat16, of any
        number of classes, 0 too. Or a DTensor that is sharded along `dim` by one axis of its mesh, and by others along
        other axes or not at all.
    target: classes of the whole vocabulary, the same on all processes, of input's shape without `dim`; int32, int64 or
        uint8. Beside a DTensor a DTensor, or a tensor of the whole's shape. Or probabilities of this process's
        classes, floating-point, of input's shape; beside a DTensor a DTensor.
    weight: shape (V,) for the whole vocabulary, on every process; a factor for the samples of each class; None: all 1.
    group: the process group; None: the default one. Not beside a DTensor, whose mesh has it.
    vocab_range: the first class of this process and the one behind its last; in the order of the ranks the ranges are
        neighbours. None: all processes have equally many.
    dim: the axis of the classes.
    smoothing_formula: "torch", or "megatron", which takes label_smoothing * V / (V - 1) in its place.
    ignore_index, reduction, label_smoothing, lse_square_scale, softcap, temperature, shift, num_items, return_…: as for
        cross_entropy; log_prob and token_accuracy not beside probabilities.

    Returns the loss, the same bits on every process, in input's dtype, float32 for half precision under autocast; of
    target's shape for "none", else (); with more results asked for a CrossEntropyOutput. Differentiable any number of
    times; the first gradient of input is in its dtype and needs no communication, further ones store the logits in
    float32 and communicate. Every process of the group has to call, and to differentiate alike.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, range, option or, on the CPU, class; RuntimeError
    where a process of the group has ended. On CUDA a sample whose class is out of range has a loss of NaN.

    Formula: loss_i = lse_i - z_i[target_i] with lse over all processes, z = softcap * tanh(x / softcap) / temperature.
    Source: Megatron-LM (arXiv 1909.08053, section 3), torch.nn.functional.cross_entropy.
    """
    returned = (return_z_loss, return_lse, return_log_prob, return_entropy, return_token_accuracy,
                return_predicted_tokens)  # fmt: skip
    numbers = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    options = read_options(LOGITS, reduction, ignore_index, *numbers, returned=returned)
    call = LossCall(LOGITS, options, smoothing_formula, weight)
    call.check(input, target)
    if hasattr(input, "device_mesh"):
        from opgrad.torch.losses import dtensors

        _check_mesh_alone(call, group, vocab_range)
        return dtensors.loss(call, input, target, dim, shift)
    logits, dtype = input.movedim(dim, -1), torch.float32 if widens_softmax(input) else input.dtype
    own = _class_range(call, group, vocab_range, logits.shape[-1])
    labels, dense = _read_targets(call, target, input.shape, dim, shift)
    return _reduced(own, of_logits, (logits,), labels, dense, dtype)


def vocab_parallel_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0,
    group: Any = None, vocab_range: tuple[int, int] | None = None, smoothing_formula: str = "torch",
    lse_square_scale: float = 0.0, softcap: float | None = None, temperature: float = 1.0, shift: int = 0,
    num_items: float | Tensor | None = None, return_lse: bool = False, return_z_loss: bool = False,
    return_log_prob: bool = False, return_entropy: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy of input @ linear_weight.T + linear_bias, of which each process has the rows of a range.

    The logits exist a chunk of tokens or of classes at a time, in the forward pass and again in the backward pass.

    input: shape (…, H), the same on all processes; float32, float64, float16 or bfloat16.
    linear_weight: shape (C, H), this process's rows of the last layer. linear_bias: shape (C,), or None. Or DTensors
        that are sharded along their first axis by one axis of a mesh; input and target then DTensors of the same mesh,
        or tensors that all processes have.
    target: classes of the whole vocabulary, of input's shape without its last axis. Tokens that do not count are
        not computed. Or probabilities of this process's classes, for which the logits are stored.
    All other arguments are those of vocab_parallel_cross_entropy.

    Returns what vocab_parallel_cross_entropy returns. The gradient of input is summed over the group, so that it is
    the whole on every process; those of the layer are this process's, summed in float32.
    Raises what vocab_parallel_cross_entropy raises.

    Formula: as there, with x = input @ linear_weight.T + linear_bias. Source: torch.nn.functional.linear_cross_entropy.
    """
    returned = (return_z_loss, return_lse, return_log_prob, return_entropy, return_token_accuracy,
                return_predicted_tokens)  # fmt: skip
    numbers = (label_smoothing, lse_square_scale, softcap, temperature, num_items)
    options = read_options(LINEAR, reduction, ignore_index, *numbers, returned=returned)
    call = LossCall(LINEAR, options, smoothing_formula, weight)
    call.check(input, target)
    if hasattr(linear_weight, "device_mesh"):
        from opgrad.torch.losses import dtensors

        _check_mesh_alone(call, group, vocab_range)
        return dtensors.linear_loss(call, input, linear_weight, linear_bias, target, shift)
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        expected = f"(C, {input.shape[-1]})"
        raise ValueError(f"{call.caller}: linear_weight has shape {tuple(linear_weight.shape)}, expected {expected}")
    check_shape(call.caller, "linear_bias", linear_bias, linear_weight.shape[:1])
    own = _class_range(call, group, vocab_range, linear_weight.shape[0])
    labels, dense = _read_targets(call, target, torch.Size((*input.shape[:-1], own.classes)), -1, shift)
    dtype = torch.float32 if narrows_products(input) else input.dtype
    return _reduced(own, of_layer, (input, linear_weight, linear_bias), labels, dense, dtype)


def _read_targets(
    call: LossCall, target: Tensor, shape: torch.Size, dim: int, shift: int
) -> tuple[Tensor, Tensor | None]:
    """The labels and, in their place, probabilities with the classes last; shape, dim: of the logits, their classes."""
    dim %= len(shape)
    of_samples = shape[:dim] + shape[dim + 1 :]
    if target.is_floating_point():
        check_shape(call.caller, "target", target, shape, "that of the logits")
        return torch.zeros(of_samples, dtype=torch.int64, device=target.device), target.movedim(dim, -1)
    check_shape(call.caller, "target", target, of_samples, "that without the classes")
    return read_labels(call.caller, target, shift, call.options.ignore_index), None


def _reduced(
    own: ClassRange, of: Callable[..., Sequence[Any]], layer: Sequence[Any], labels: Tensor, dense: Tensor | None,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """The loss of the samples' results that `of` gives."""
    dtype = dtype if dense is None else torch.promote_types(dtype, dense.dtype)
    found = of(*layer, labels, dense, own, dtype)
    return reduced(found, labels, own.call.weight, dense is not None, own.call.options, dtype)


def _class_range(call: LossCall, group: Any, vocab_range: tuple[int, int] | None, classes: int) -> ClassRange:
    """This process's classes. Raises ValueError for a range of another length."""
    member = member_of(call.caller, group)
    first = member[0] * classes
    if vocab_range is not None:
        first, last = (int(each) for each in vocab_range)
        if first < 0 or last - first != classes:
            raise ValueError(f"{call.caller}: vocab_range is {vocab_range}, expected {classes} classes, as input has")
    return ClassRange(call, first, classes, member)


def _check_mesh_alone(call: LossCall, group: Any, vocab_range: Any) -> None:
    if group is not None or vocab_range is not None:
        raise ValueError(f"{call.caller}: group or vocab_range is given beside a DTensor, expected its mesh alone")


class _Options:
    """Options of a loss as attributes of a module, which may be changed as those of PyTorch's modules may."""

    names: tuple[str, ...]

    def _take(self, function: Callable[..., Any], options: Mapping[str, Any], taken: tuple[str, ...] = ()) -> None:
        """Set the keywords of the function, but for what is `taken`. Raises TypeError for others, ValueError."""
        parameters = inspect.signature(function).parameters.values()
        known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in taken}
        kind = type(self).__name__
        for name in options:
            if name not in known:
                raise TypeError(f"{kind}: {name} is no option, expected one of {', '.join(known)}")
        self.names = tuple(known)
        for name, default in known.items():
            setattr(self, name, options.get(name, default))
        this: Any = self
        bent = (this.label_smoothing, this.lse_square_scale, this.softcap, this.temperature, this.num_items)
        read_options(kind, this.reduction, this.ignore_index, *bent)

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names}


class CrossEntropyLoss(_Options, torch.nn.CrossEntropyLoss):
    """`opgrad.torch.cross_entropy` as a module: arguments of torch.nn.CrossEntropyLoss, then the function's keywords.

    All of them are attributes. Raises TypeError for other names, ValueError for values out of range.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **options: Any,
    ):
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self._take(cross_entropy, options)

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """The loss, or CrossEntropyOutput where other results are asked for."""
        return cross_entropy(input, target, self.weight, **self._given())

    def _given(self) -> dict[str, Any]:
        first = ("ignore_index", "reduction", "label_smoothing")
        return {name: getattr(self, name) for name in first} | super()._given()

    def extra_repr(self) -> str:
        return _written(self._given())


class LinearCrossEntropyLoss(_Options, torch.nn.Module):
    """A linear layer and its loss: `opgrad.torch.linear_cross_entropy` with its options, the keywords of the function.

    in_features, num_classes, out_features, bias, device, dtype: of the layer, as torch.nn.LinearCrossEntropyLoss has
    them; its parameters are `linear.weight` and `linear.bias`. linear: a layer to share instead, such as the output
    layer of a model. The options are attributes. Raises TypeError for options of other names, ValueError for values
    out of range.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int | None = None,
        num_classes: int | None = None,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        linear: torch.nn.Linear | None = None,
        **options: Any,
    ):
        super().__init__()
        self._take(linear_cross_entropy, options, ("linear_bias", "weight"))
        self.out_features = tuple(out_features)
        each = math.prod(self.out_features)
        if linear is None:
            if in_features is None or num_classes is None:
                raise TypeError("LinearCrossEntropyLoss: expected in_features and num_classes, or linear")
            linear = torch.nn.Linear(in_features, num_classes * each, bias, device=device, dtype=dtype)
        self.num_classes = linear.out_features // each
        if weight is not None and weight.shape != (self.num_classes,):
            shape, expected = tuple(weight.shape), (self.num_classes,)
            raise ValueError(f"LinearCrossEntropyLoss: weight has shape {shape}, expected {expected}, the classes")
        self.register_buffer("weight", weight)
        self.linear = linear

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """The loss, or CrossEntropyOutput where other results are asked for."""
        w: Tensor = self.linear.weight
        b: Tensor | None = self.linear.bias
        if self.out_features:
            w = w.view(-1, *self.out_features, w.shape[-1])
            b = None if b is None else b.view(-1, *self.out_features)
        return linear_cross_entropy(input, w, target, linear_bias=b, weight=self.weight, **self._given())

    def extra_repr(self) -> str:
        named = {"num_classes": self.num_classes, "out_features": self.out_features}
        return _written({**named, **self._given()})


def _written(options: Mapping[str, Any]) -> str:
    """Options as they are written in a call, without those that are off."""
    off = (None, False, 0, ())  # the label 0 is none of them
    shown = {name: value for name, value in options.items() if name == "ignore_index" or value not in off}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())

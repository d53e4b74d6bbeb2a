"""Cross-entropy over a vocabulary that is split over the processes of a group, from logits or from a linear layer.

Each process computes the statistics of its classes for each row, and gathers those of all processes, in one all-gather.
It combines them in the order of the ranks, in float64, so that every process has the same bits. The results are those
that `sample_losses` returns for unsplit classes, and they are reduced in the same way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opgrad.torch.autocast import narrows_products, widens_softmax
from opgrad.torch.losses.layer_operators import ClassRange, LossCall, member_of, of_layer, of_logits
from opgrad.torch.losses.options import check_shape, read_labels, read_options
from opgrad.torch.losses.reduced import reduced

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
    ignore_index: samples with this class have loss and gradient 0 and do not count.
    reduction: "none", "sum" or "mean", as in torch.nn.functional.cross_entropy.
    label_smoothing: in [0, 1]; this much of each sample's probability is shared by all classes.
    group: the process group; None: the default one. Not beside a DTensor, whose mesh has it.
    vocab_range: the first class of this process and the one behind its last; in the order of the ranks the ranges are
        neighbours. None: all processes have equally many.
    dim: the axis of the classes.
    smoothing_formula: "torch", or "megatron", which takes label_smoothing * V / (V - 1) in its place.
    lse_square_scale: the factor of the z-loss, the mean (for "sum": the sum) of lse**2, which is added.
    softcap: bounds the logits, softcap * tanh(x / softcap); None: none. temperature: divides them then.
    shift: sample i meets the target of place i + shift along target's last axis; the last ones do not count.
    num_items: what "mean" divides by in place of what counts.
    return_…: also return fields of CrossEntropyOutput. log_prob, token_accuracy: not beside probabilities.

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
        raise ValueError(f"{call.who}: linear_weight has shape {tuple(linear_weight.shape)}, expected {expected}")
    check_shape(call.who, "linear_bias", linear_bias, linear_weight.shape[:1])
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
        check_shape(call.who, "target", target, shape, "that of the logits")
        return torch.zeros(of_samples, dtype=torch.int64, device=target.device), target.movedim(dim, -1)
    check_shape(call.who, "target", target, of_samples, "that without the classes")
    return read_labels(call.who, target, shift, call.options.ignore_index), None


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
    member = member_of(call.who, group)
    first = member[0] * classes
    if vocab_range is not None:
        first, last = (int(each) for each in vocab_range)
        if first < 0 or last - first != classes:
            raise ValueError(f"{call.who}: vocab_range is {vocab_range}, expected {classes} classes, as input has")
    return ClassRange(call, first, classes, member)


def _check_mesh_alone(call: LossCall, group: Any, vocab_range: Any) -> None:
    if group is not None or vocab_range is not None:
        raise ValueError(f"{call.who}: group or vocab_range is given beside a DTensor, expected its mesh alone")

"""Cross-entropy over a vocabulary that is split over the processes of a group, from logits or from a linear layer."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opgrad.torch import shards
from opgrad.torch.functions import autocasts
from opgrad.torch.shard_losses import Options, result, shifted
from opgrad.torch.shards import Rows


def vocab_parallel_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, *, group: Any = None, vocab_range: tuple[int, int] | None = None, dim: int = -1,
    smoothing_formula: str = "torch", lse_square_scale: float = 0.0, softcap: float | None = None,
    temperature: float = 1.0, shift: int = 0, num_items: float | Tensor | None = None, return_lse: bool = False,
    return_z_loss: bool = False, return_log_prob: bool = False, return_entropy: bool = False,
    return_token_accuracy: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy of logits of which each process of a group has the classes of a range, with one all-gather.

    input: logits of this process's classes, which lie along `dim`; float32, float64, float16 or bfloat16, of any
        number of classes, 0 too. Or a DTensor that is sharded along `dim` by one axis of its mesh, and by others along
        other axes or not at all.
    target: classes of the whole vocabulary, the same on all processes, of input's shape without `dim`; int32 or int64.
        Beside a DTensor a DTensor, or a tensor of the whole's shape.
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
    shift: 1 takes the target of the next place, along target's last axis; the last place does not count.
    num_items: what the sum is divided by in place of what "mean" would take; None: that.
    return_lse, return_z_loss, return_log_prob, return_entropy, return_token_accuracy: more results, all but the last
        differentiable; they come as a `VocabParallelLoss`.

    Returns the loss, the same bits on every process, in input's dtype, float32 for half precision under autocast; of
    target's shape for "none", else (). Differentiable once; the gradient of input is in its dtype and needs no
    communication. Every process of the group has to call.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, range, option or, on the CPU, class. On CUDA a
    sample whose class is out of range has a loss of NaN.

    Formula: loss_i = lse_i - z_i[target_i] with lse over all processes, z = softcap * tanh(x / softcap) / temperature.
    Source: Megatron-LM (arXiv 1909.08053, section 3), torch.nn.functional.cross_entropy.
    """
    wanted = {"lse": return_lse, "z_loss": return_z_loss, "log_prob": return_log_prob, "entropy": return_entropy}
    wanted["token_accuracy"] = return_token_accuracy
    options = Options(
        "vocab_parallel_cross_entropy", weight, ignore_index, reduction, label_smoothing, smoothing_formula,
        lse_square_scale, softcap, temperature, shift, num_items, frozenset(name for name in wanted if wanted[name]),
    )  # fmt: skip
    _check(options, input, target)
    if type(input) is not Tensor and hasattr(input, "device_mesh"):
        from opgrad.torch import vocab_parallel_dtensor

        return vocab_parallel_dtensor.loss(options, input, target, dim, group, vocab_range)
    return _from_logits(options, input, target, group, vocab_range, dim)


def _from_logits(
    options: Options, input: Tensor, target: Tensor, group: Any, vocab_range: tuple[int, int] | None, dim: int
) -> Any:
    logits = input.movedim(dim, -1)
    _check_shapes(options, target, logits.shape[:-1])
    first = first_class(options, group, vocab_range, logits.shape[-1])
    shard = options.shard(group, first, logits.shape[-1])
    labels = shifted(options, target)
    rows = shards.of_logits(
        logits.reshape(labels.numel(), shard.classes),
        labels.reshape(-1),
        options.own_weight(first, shard.classes),
        shard,
    )
    dtype = torch.float32 if autocasts(input) else input.dtype
    return result(options, rows, labels, dtype)


def vocab_parallel_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0,
    group: Any = None, vocab_range: tuple[int, int] | None = None, smoothing_formula: str = "torch",
    lse_square_scale: float = 0.0, softcap: float | None = None, temperature: float = 1.0, shift: int = 0,
    num_items: float | Tensor | None = None, return_lse: bool = False, return_z_loss: bool = False,
    return_log_prob: bool = False, return_entropy: bool = False, return_token_accuracy: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy of input @ linear_weight.T + linear_bias, of which each process has the rows of a range.

    The logits exist a chunk of tokens at a time, in the forward pass and again in the backward pass.

    input: shape (…, H), the same on all processes; float32, float64, float16 or bfloat16.
    linear_weight: shape (C, H), this process's rows of the last layer. linear_bias: shape (C,), or None.
    target: classes of the whole vocabulary, of input's shape without its last axis. Tokens that do not count are
        not computed.
    All other arguments are those of vocab_parallel_cross_entropy.

    Returns what vocab_parallel_cross_entropy returns. The gradient of input is summed over the group, so that it is
    the whole on every process; those of the layer are this process's, summed in float32.
    Raises what vocab_parallel_cross_entropy raises.

    Formula: as there, with x = input @ linear_weight.T + linear_bias. Source: torch.nn.functional.linear_cross_entropy.
    """
    wanted = {"lse": return_lse, "z_loss": return_z_loss, "log_prob": return_log_prob, "entropy": return_entropy}
    wanted["token_accuracy"] = return_token_accuracy
    options = Options(
        "vocab_parallel_linear_cross_entropy", weight, ignore_index, reduction, label_smoothing, smoothing_formula,
        lse_square_scale, softcap, temperature, shift, num_items, frozenset(name for name in wanted if wanted[name]),
    )  # fmt: skip
    _check(options, input, target)
    _check_shapes(options, target, input.shape[:-1])
    _check_layer(options, input, linear_weight, linear_bias)
    if autocasts(input) or torch.is_autocast_enabled(input.device.type):
        half = torch.get_autocast_dtype(input.device.type)
        input, linear_weight = input.to(half), linear_weight.to(half)
        linear_bias = None if linear_bias is None else linear_bias.to(half)
    classes = linear_weight.shape[0]
    first = first_class(options, group, vocab_range, classes)
    labels = shifted(options, target)
    counted = (labels.reshape(-1) != ignore_index).nonzero()[:, 0]
    x, picked = input.reshape(-1, input.shape[-1])[counted], labels.reshape(-1)[counted]
    shard = options.shard(group, first, classes)
    found = shards.of_linear(x, linear_weight, linear_bias, picked, options.own_weight(first, classes), shard)
    spread = [each.new_zeros(labels.numel()).index_copy(0, counted, each) for each in found[:5]]
    return result(
        options, Rows._make([*spread, found.total]), labels, torch.float32 if autocasts(input) else input.dtype
    )


# --- checks ----------------------------------------------------------------------------------------------------------


def _check(options: Options, input: Any, target: Any) -> None:
    for name, value in (("input", input), ("target", target), ("weight", options.weight)):
        if not isinstance(value, Tensor) and (value is not None or name != "weight"):
            raise TypeError(f"{options.who}: {name} is {type(value).__name__}, expected a PyTorch tensor")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{options.who}: target has dtype {target.dtype}, expected int32 or int64")
    if not input.dim():
        raise ValueError(f"{options.who}: input has 0 dimensions, expected at least 1")
    options.check()


def _check_shapes(options: Options, target: Tensor, expected: torch.Size) -> None:
    if target.shape != expected:
        found, wanted = tuple(target.shape), tuple(expected)
        raise ValueError(f"{options.who}: target has shape {found}, expected {wanted}, input's without the classes")
    if options.shift and not target.dim():
        raise ValueError(f"{options.who}: shift is 1 and target has no axis, expected one")


def _check_layer(options: Options, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        expected = f"(C, {input.shape[-1]})"
        raise ValueError(f"{options.who}: linear_weight has shape {tuple(weight.shape)}, expected {expected}")
    if bias is not None and bias.shape != weight.shape[:1]:
        expected = str((weight.shape[0],))
        raise ValueError(f"{options.who}: linear_bias has shape {tuple(bias.shape)}, expected {expected}")


def first_class(options: Options, group: Any, vocab_range: tuple[int, int] | None, classes: int) -> int:
    """The first class of this process. Raises ValueError for a range of another length."""
    if not dist.is_initialized():
        raise RuntimeError(f"{options.who}: there is no process group, expected torch.distributed to be initialised")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{options.who}: this process is not in the group, expected one of its own")
    if vocab_range is None:
        return dist.get_rank(group) * classes
    first, last = vocab_range
    if first < 0 or last - first != classes:
        raise ValueError(f"{options.who}: vocab_range is {vocab_range}, expected {classes} classes, as input has")
    return int(first)

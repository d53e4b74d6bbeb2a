"""Cross-entropy over a vocabulary that is split over the processes of a group, from logits or from a linear layer."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opgrad.contract import REDUCTIONS
from opgrad.torch import shards
from opgrad.torch.functions import autocasts
from opgrad.torch.shards import Rows, Scale, Shard

FORMULAS = ("torch", "megatron")


class VocabParallelLoss(NamedTuple):
    """The results that a call asked for beside the loss; None: those that it did not.

    lse: the log-sum-exp of each token. z_loss: the part of the loss that lse_square_scale adds. log_prob: the
    log-probability of each target. entropy: of each token's softmax. token_accuracy: the share of tokens that count
    whose target has the largest logit.
    """

    loss: Tensor
    lse: Tensor | None = None
    z_loss: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """How the loss is made of what the rows come to; `who` is the caller, for messages."""

    who: str
    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    smoothing_formula: str
    lse_square_scale: float
    softcap: float | None
    temperature: float
    shift: int
    num_items: Any
    wanted: frozenset[str]

    def check(self) -> None:
        """Raise ValueError for an option that has no meaning."""
        known = {
            "reduction": (self.reduction in REDUCTIONS, ", ".join(REDUCTIONS)),
            "label_smoothing": (0 <= self.label_smoothing <= 1, "a number from 0 to 1"),
            "smoothing_formula": (self.smoothing_formula in FORMULAS, " or ".join(FORMULAS)),
            "softcap": (self.softcap is None or self.softcap >= 0, "a number of at least 0, or None"),
            "temperature": (self.temperature > 0, "a number above 0"),
            "shift": (self.shift in (0, 1), "0 or 1"),
        }
        for name, (holds, expected) in known.items():
            if not holds:
                raise ValueError(f"{self.who}: {name} is {getattr(self, name)!r}, expected {expected}")
        if self.weight is not None and self.smoothing_formula == "megatron":
            raise ValueError(f"{self.who}: weight is given, expected none with Megatron's formula")

    def shard(self, group: Any, first: int, classes: int) -> Shard:
        scale = Scale(float(self.softcap or 0.0), float(self.temperature))
        return Shard(group, first, classes, scale, "entropy" in self.wanted)

    def own_weight(self, first: int, classes: int) -> Tensor | None:
        """The weights of a shard's classes."""
        return None if self.weight is None else self.weight[first : first + classes].contiguous()


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
    return _result(options, rows, labels, dtype)


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
    return _result(
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


def shifted(options: Options, target: Tensor) -> Tensor:
    """The target of each place."""
    if not options.shift:
        return target.contiguous()
    last = torch.full_like(target[..., :1], options.ignore_index)
    return torch.cat([target[..., 1:], last[..., : target.shape[-1]]], -1)


# --- the loss --------------------------------------------------------------------------------------------------------


def _result(options: Options, rows: Rows, labels: Tensor, dtype: torch.dtype, groups: tuple[Any, ...] = ()) -> Any:
    """The loss, alone or with what was asked for; `groups`: those that have the other rows of the whole."""
    flat, total = labels.reshape(-1), rows.total
    counts = flat != options.ignore_index
    wrong = counts & ((flat < 0) | (flat >= total))
    if flat.device.type == "cpu" and bool(wrong.any()):
        place = int(wrong.nonzero()[0, 0])
        raise ValueError(f"{options.who}: target is {int(flat[place])} at {place}, expected 0 to {total - 1}")
    # What does not count is left out first: then its gradients are 0, whatever its logits are.
    lse, target, sums, mean = (torch.where(counts, each, 0.0) for each in rows[:4])
    target = torch.where(wrong, torch.nan, target)
    picked = torch.where(counts & ~wrong, flat, 0).long()
    weights = counts.double() if options.weight is None else counts * options.weight.double()[picked]
    losses = weights * (lse - target)
    if options.label_smoothing:
        losses = _smoothed(options, losses, lse, sums, counts, total)
    log_prob, z_losses = target - lse, options.lse_square_scale * lse.square()
    over = _divisors(options, weights, counts, groups)
    loss, z_loss = (_reduced(options, each, by, labels) for each, by in zip((losses, z_losses), over, strict=True))
    found = {"lse": lse, "log_prob": log_prob, "entropy": lse - mean}
    extra = {name: each.view(labels.shape).to(shards._wide(dtype)) for name, each in found.items()}
    extra |= {"z_loss": z_loss.to(dtype), "token_accuracy": _accuracy(rows, target, counts, groups)}
    value = (loss + z_loss).to(dtype)
    return VocabParallelLoss(value, **{name: extra[name] for name in options.wanted}) if options.wanted else value


def _smoothed(options: Options, losses: Tensor, lse: Tensor, sums: Tensor, counts: Tensor, total: Any) -> Tensor:
    smoothing = options.label_smoothing
    if options.smoothing_formula == "megatron":
        smoothing = smoothing * total / (total - 1)
    every = total if options.weight is None else options.weight.double().sum()
    return (1 - smoothing) * losses + smoothing / total * (lse * every - sums)


def _divisors(options: Options, weights: Tensor, counts: Tensor, groups: tuple[Any, ...]) -> tuple[Any, Any]:
    """What the sums of the losses and of the z-losses are divided by."""
    if options.num_items is not None:
        return options.num_items, options.num_items
    if options.reduction != "mean":
        return 1.0, 1.0
    both = torch.stack([weights.sum(), counts.double().sum()])
    for group in groups:
        dist.all_reduce(both, group=group)
    return both[0], both[1]


def _reduced(options: Options, losses: Tensor, by: Any, labels: Tensor) -> Tensor:
    if options.reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    if isinstance(by, Tensor):
        return torch.where(by == 0, total * 0.0, total / torch.where(by == 0, 1.0, by))
    return total / by


def _accuracy(rows: Rows, target: Tensor, counts: Tensor, groups: tuple[Any, ...]) -> Tensor:
    hits = torch.stack([(counts & (target >= rows.largest)).sum(), counts.sum()]).double()
    for group in groups:
        dist.all_reduce(hits, group=group)
    return (hits[0] / hits[1].clamp(min=1)).float().detach()

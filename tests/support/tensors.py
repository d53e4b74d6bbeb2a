"""NumPy arrays as tensors and back, bit by bit, with dtypes, too, that PyTorch and NumPy do not lend each other; losses
in PyTorch's functions."""

import numpy as np
import torch

from opgrad.call.libraries import torch_tensors


def tensor(value):
    """A NumPy array as a tensor of its own; everything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    made = torch.empty(value.shape, dtype=torch_tensors.TORCH_DTYPES[value.dtype])
    np.copyto(torch_tensors.view_of(made), value)
    return made


def array(value):
    return torch_tensors.view_of(value.detach()).copy()


def on_tensors(arguments):
    return {name: tensor(value) for name, value in arguments.items()}


def loss_of(
    logits, labels, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, lse_square_scale=0.0,
    softcap=None, temperature=1.0, num_items=None,
):  # fmt: skip
    """Cross-entropy with options in PyTorch's own functions."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    z, classes, counts, q = z / temperature, logits.shape[1], torch.ones_like(logits[:, 0], dtype=bool), labels
    w = logits.new_ones(classes) if weight is None else weight
    is_class = not labels.is_floating_point()
    if is_class:
        counts = labels != ignore_index
        labels = torch.where(counts, labels, 0)
        q = torch.nn.functional.one_hot(labels, classes).movedim(-1, 1).to(z.dtype)
    q = q * (1 - label_smoothing) + label_smoothing / classes
    shaped = w.reshape(-1, *[1] * (logits.ndim - 2))
    losses = torch.where(counts, -(shaped * q * torch.log_softmax(z, 1)).sum(1), 0)
    squares = torch.where(counts, torch.logsumexp(z, 1) ** 2, 0) * lse_square_scale
    if reduction != "mean":
        return losses + squares if reduction == "none" else (losses + squares).sum()
    if num_items is not None:
        return (losses + squares).sum() / num_items
    by_weight = torch.where(counts, w[labels], 0).sum() if is_class else counts.sum()
    return losses.sum() / by_weight + squares.sum() / counts.sum()

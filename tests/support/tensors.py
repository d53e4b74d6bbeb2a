"""NumPy arrays as tensors and back, bit by bit; with dtypes, too, that PyTorch and NumPy do not lend each other."""

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

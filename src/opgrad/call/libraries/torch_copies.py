"""Arrays as tensors and back; by their bits for dtypes of ml_dtypes, which NumPy and PyTorch have each for itself."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from opgrad.contract import Array

REGISTERED = 2  # what `isbuiltin` is for dtypes that a package gives NumPy, such as those of ml_dtypes


def shared(array: Array) -> torch.Tensor:
    """A tensor on an array's memory."""
    if array.dtype.isbuiltin != REGISTERED:
        return torch.from_numpy(array)
    bits: Array = array.view(np.int16 if array.itemsize > 1 else np.int8)
    dtype: Any = getattr(torch, array.dtype.name)
    return torch.from_numpy(bits).view(dtype)


def upload(array: Array, device: str) -> torch.Tensor:
    """A tensor of its own on a device with the numbers of an array."""
    return shared(np.array(array, order="C")).to(device)


def download(tensor: torch.Tensor) -> Array:
    """An array with the numbers of a tensor."""
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()

"""The tensors of a cell."""

import copy
import math
from typing import Any

import numpy as np
import torch

from bench.case import Case, signature
from bench.cells import Cell
from opgrad.call.libraries.torch_copies import download
from opgrad.call.libraries.torch_tensors import TORCH_DTYPES, spec
from opgrad.cli.examples.arguments import ArraySource
from opgrad.contract import Array, Shape
from opgrad.contract.signature import Prepared, prepare

REFERENCE_ELEMENTS = 1 << 26  # of a loss's logits that are widened to float64 at once


class Random:
    """Random tensors on a device."""

    def __init__(self, device: str, seed: int):
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def integers(self, high: int, shape: Shape) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def normal(self, shape: Shape, dtype: str) -> torch.Tensor:
        return self._empty(shape, dtype).normal_(generator=self.generator)

    def factors(self, shape: Shape, dtype: str) -> torch.Tensor:
        return self._empty(shape, dtype).uniform_(0.5, 1.5, generator=self.generator)

    def _empty(self, shape: Shape, dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)


class TensorCase(Case):
    """A cell with its memory on a device."""

    def __init__(self, cell: Cell, device: str):
        self.device = device
        super().__init__(cell)

    def source(self, seed: int) -> ArraySource:
        return Random(self.device, seed)

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> torch.Tensor:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self.device)

    def placed(self, value: Any) -> Any:
        return value

    def prepared(self) -> Prepared:
        return prepare(self.op, *signature(self.op, self.values, spec))

    def numpy(self, array: torch.Tensor) -> Array:
        return download(array)

    def regime(self) -> str:
        """The name of the regime that the kernel runs in."""
        out = list(map(spec, self.results.values()))
        checked = prepare(self.op, *signature(self.op, self.values, spec), out, any_stride=True)
        return str(self.op.kernel("opgrad.cuda")(checked.problem).regime)

    def copies(self, count: int) -> list["TensorCase"]:
        """This case and others like it, each in memory of its own."""
        return [self, *(self._copy() for _ in range(count - 1))]

    def _copy(self) -> "TensorCase":
        made = copy.copy(self)
        made.values = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.values.items()
        }
        made.results = {name: torch.empty_like(value) for name, value in self.results.items()}
        return made

    def _mean_loss(self) -> Array:
        """The mean over all samples by PyTorch in float64, on the device: the host would take seconds for it."""
        logits, labels = self.values["logits"], self.values["labels"]
        samples = max(1, REFERENCE_ELEMENTS * len(logits) // math.prod(logits.shape))
        total = 0.0
        for some, theirs in zip(logits.split(samples), labels.split(samples), strict=True):
            total += torch.nn.functional.cross_entropy(some.double(), theirs, reduction="sum").item()
        return np.array(total / labels.numel())

"""The arrays of an operator of training graphs as PyTorch's tensors, and what sets torch's calls up with them.

A setup gets the tensors and returns the call to be timed, or None for arguments that torch cannot take. Each call
returns the operator's results, in its order, as far as torch has them. It writes into the case's arrays where torch's
own kernel can; where torch only has an `out` that copies, it returns new tensors. Indices are converted before the
call, so that no conversion is timed.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import opgrad
from opgrad.bench.graph_case import GraphCase

ML_DTYPE = "bfloat16"  # which NumPy and torch know from each other by its bits alone


class Tensors:
    """The case's arrays as tensors in the same memory, by name; other arguments as they are, or their defaults."""

    def __init__(self, case: GraphCase):
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(opgrad.get_num_threads())
        self.aten = self.torch.ops.aten
        self.op = case.op
        self.values = {name: self._converted(value) for name, value in case.values.items()}
        self.results = {name: self._converted(value) for name, value in case.results.items()}

    def _converted(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._converted(each) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.name == ML_DTYPE:
            return self.torch.from_numpy(value.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(value)

    def __getitem__(self, name: str) -> Any:
        """The argument of this name; None for an input that is not given."""
        return self.values[name] if name in self.values else self.op.attributes.get(name)

    def rows(self, name: str, axis: int) -> Any:
        """An argument or a result as rows, each of all axes from `axis` on."""
        tensor = self.results[name] if name in self.results else self[name]
        shape = tensor.shape
        start = axis % len(shape)
        return tensor.view(math.prod(shape[:start]), math.prod(shape[start:]))


Call = Callable[[], object]
Setups = Mapping[str, Callable[[Tensors], Call | None]]

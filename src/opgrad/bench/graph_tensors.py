"""The arrays of an operator of training graphs as PyTorch's tensors, and what sets torch's calls up with them.

A setup gets the tensors and returns the call to be timed, or None for arguments that torch cannot take. Each call
returns the operator's results, in its order, as far as torch has them, in new memory or in the case's arrays. It
raises NoSuchWay where torch has no kernel that works this way, but for an `out` that copies. Indices are converted
before the call, so that no conversion is timed.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from opgrad.bench.graph_case import GraphCase
from opgrad.bench.torch_calls import TorchCalls, tensor_of
from opgrad.bench.ways import Call


class Tensors(TorchCalls):
    """The case's arrays as tensors in the same memory, by name; other arguments as they are, or their defaults."""

    def __init__(self, case: GraphCase, way: str):
        super().__init__(way)
        self.op = case.op
        self.values = {name: self._converted(value) for name, value in case.values.items()}
        self.results = {name: self._converted(value) for name, value in case.results.items()}

    def _converted(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._converted(each) for each in value]
        return tensor_of(self.torch, value) if isinstance(value, np.ndarray) else value

    def __getitem__(self, name: str) -> Any:
        """The argument of this name; None for an input that is not given."""
        return self.values[name] if name in self.values else self.op.attributes.get(name)

    def rows(self, name: str, axis: int) -> Any:
        """An argument or a result as rows, each of all axes from `axis` on."""
        tensor = self.results[name] if name in self.results else self[name]
        shape = tensor.shape
        start = axis % len(shape)
        return tensor.view(math.prod(shape[:start]), math.prod(shape[start:]))


Setups = Mapping[str, Callable[[Tensors], Call | None]]

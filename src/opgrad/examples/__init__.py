"""Arguments for the operators of training graphs, on which tests, the self-test and the benchmark run them.

The function of an operator has its name and stands in the file of its family. It takes a random generator and
whether the benchmark asks, and gives small examples, several of them, or a single large one.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgrad.accuracy import widened
from opgrad.contract import DTYPES, FLOATS, Array, Operator

Examples = Callable[[np.random.Generator, bool], Sequence["Example"]]


@dataclass(frozen=True)
class Example:
    """Arguments by name, floating-point arrays in float64; `terms` is the length of the longest sum in the results."""

    arguments: Mapping[str, Any]
    terms: int = 1


def examples(op: Operator, dtype: str, *, large: bool = False, seed: int = 0) -> list[Example]:
    """Examples for an operator, its floating-point arrays in this dtype, or in float32 where they cannot have it."""
    make: Examples = getattr(importlib.import_module(f"opgrad.examples.{op.family}"), op.name)
    found = make(np.random.default_rng(seed), large)
    return [Example(_converted(op, example.arguments, dtype), example.terms) for example in found]


def expected(op: Operator, arguments: Mapping[str, Any]) -> list[Array]:
    """The results of the float64 reference, one behind the other."""
    exact = {name: widened(value) for name, value in arguments.items() if name not in ("out", "out_dtype")}
    with np.errstate(all="ignore"):
        return [np.asarray(each) for each in listed(op.reference(**exact))]


def listed(results: Any) -> list[Any]:
    """What a call returns, lists in it too, as one list."""
    if not isinstance(results, tuple | list):
        return [results]
    return [array for each in results for array in listed(each)]


def _converted(op: Operator, arguments: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    def convert(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [convert(name, each) for each in value]
        if not isinstance(value, np.ndarray) or value.dtype != np.float64:
            return value
        allowed = op.inputs[name].dtypes if name in op.inputs else FLOATS
        return _cast(value, dtype if dtype in allowed else "float32")

    return {name: convert(name, value) for name, value in arguments.items()}


def _cast(array: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        return array.astype(DTYPES[dtype])

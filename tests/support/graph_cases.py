"""The operators of training graphs on their examples: the call, the float64 reference, and the comparison."""

import numpy as np
import pytest

import opgrad
from opgrad.cli.examples import listed
from opgrad.cli.examples.arguments import error_in_ulp, tolerance
from opgrad.contract import FLOATS
from opgrad.ops import graph_operators

OPERATORS = list(graph_operators().values())
each_operator = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
# Both half types take the same ways: an operator is tried in one, the next in the other.
CASES = [
    (op, dtype)
    for number, op in enumerate(OPERATORS)
    for dtype in FLOATS
    if dtype != ("float16", "bfloat16")[number % 2]
]
each_dtype = pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op.name}-{dtype}" for op, dtype in CASES])


def call(op, arguments, **more):
    return listed(getattr(opgrad, op.name)(**arguments, **more))


def changed(arguments, change):
    """The arguments with `change(array)` for each array."""

    def of(value):
        if isinstance(value, list):
            return [of(each) for each in value]
        return change(value) if isinstance(value, np.ndarray) else value

    return {name: of(value) for name, value in arguments.items()}


def arrays_of(arguments):
    found = []
    changed(arguments, lambda array: found.append(array) or array)
    return found


def check_close(results, expected, terms, inexact=1):
    """Floats within the tolerance of their dtype and the length of the longest sum; all else the same.

    inexact: 2 where what is expected may be off by the tolerance as well, to the other side.
    """
    assert len(results) == len(expected)
    for got, exact in zip(results, expected, strict=True):
        exact = np.asarray(exact)
        assert got.shape == exact.shape
        if got.dtype.name in FLOATS:
            assert error_in_ulp(got, exact) <= inexact * tolerance(got.dtype.name, terms)
        else:
            np.testing.assert_array_equal(got, exact)

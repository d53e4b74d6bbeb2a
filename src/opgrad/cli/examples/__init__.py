"""Example arguments of every operator, on which tests, the self-test and the benchmark run it.

They follow from the declaration (`opgrad.cli.examples.arguments`), unless arrays have shapes of their own, as those of
operators that only training graphs have. Such an operator has a function of its name in one of the other files here. It
takes a random generator and cases, such as shapes, of which it makes examples; by default small ones of all kinds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from opgrad.call.arrays import as_given, expanded, spec_of
from opgrad.cli.examples import arrays, layers
from opgrad.cli.examples.arguments import PLANNED, Example, arguments, options_of, signature
from opgrad.cli.examples.arguments import expected as expected
from opgrad.cli.examples.arguments import listed as listed
from opgrad.contract import DTYPES, FLOATS, Operator, Spec

Examples = Callable[..., Iterable[Example]]
FILES = (layers, arrays)


def examples(op: Operator, dtype: str, *, seed: int = 0, **cases: Any) -> list[Example]:
    """Examples for an operator, its floating-point arrays in this dtype, or in float32 where they cannot have it.

    cases: in place of its own, for an operator that has a function here.
    """
    make = own_examples(op)
    if make is None:
        return [
            Example(
                arguments(op, shape, dtype, seed=seed, **options), max(math.prod(shape), *options.get("indices", (1,)))
            )
            for shape, options in options_of(op)
        ]
    found = make(np.random.default_rng(seed), **cases)
    return [Example(_converted(op, example.arguments, dtype), example.terms) for example in found]


def signatures(op: Operator, dtype: str) -> Iterator[tuple[Operator, list[Spec | None], dict[str, Any]]]:
    """The signatures of the examples' calls: the form of the operator, its arrays and its attributes.

    Where examples are derived, so are calls that are only planned.
    """
    if own_examples(op) is None:
        for shape, options in (*options_of(op), *PLANNED.get(op.kind, ())):
            yield op, *signature(op, shape, dtype, **options)
        return
    for example in examples(op, dtype):
        of, given = expanded(op, dict(example.arguments))
        given = as_given(of, given)
        attributes = {name: given[name] for name in of.attributes if name in given}
        yield of, [spec_of(given.get(name)) for name in of.arrays], attributes


def own_examples(op: Operator) -> Examples | None:
    """The function that makes an operator's examples; None if they follow from its declaration."""
    return next((getattr(file, op.name) for file in FILES if hasattr(file, op.name)), None)


def _converted(op: Operator, given: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    def convert(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [convert(name, each) for each in value]
        if not isinstance(value, np.ndarray) or value.dtype != np.float64:
            return value
        allowed = op.inputs[name].dtypes if name in op.inputs else FLOATS
        with np.errstate(all="ignore"):
            return value.astype(DTYPES[dtype if dtype in allowed else "float32"])

    return {name: convert(name, value) for name, value in given.items()}

"""The forms of softmax that are measured: what a call is given besides arrays and axis, by a name for tables."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import Numpy
from opgrad.contract import Shape
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import Dropout

Attributes = dict[str, Any]

DROPPED = 0.1  # dropout's probability
BROADCAST_SHAPE = (32, 16, 128, 128)


def _where(made: Numpy, shape: Shape) -> Attributes:
    """Six elements of seven take part."""
    return {"where": made.normal(shape, "float32") > -1}


def _added(pattern: Shape, made: Numpy, shape: Shape) -> Attributes:
    """An operand with the whole of some axes; `pattern` has 1 for the others."""
    sizes = tuple(size if kept > 1 else 1 for kept, size in zip(pattern, shape, strict=True))
    return {"post_ops": (post_ops.add(made.normal(sizes, "float32")),)}


def _gated(made: Numpy, shape: Shape) -> Attributes:
    """What has a gradient: a scale, a product and a function."""
    gate = made.factors(shape[-1:], "float32")
    return {"result_scale": 2.0, "post_ops": (post_ops.mul(gate), post_ops.relu())}


def _same(attributes: Attributes) -> Callable[[Numpy, Shape], Attributes]:
    return lambda made, shape: dict(attributes)


def _chain(*operations: post_ops.PostOp) -> Callable[[Numpy, Shape], Attributes]:
    return _same({"post_ops": operations})


# All 16 ways in which an operand with four axes broadcasts, by the axes that it has.
PATTERNS = {
    f"add {'x'.join(map(str, sizes))}": sizes for sizes in itertools.product(*((1, size) for size in BROADCAST_SHAPE))
}
BROADCASTS = tuple(PATTERNS)

FORMS: Mapping[str, Callable[[Numpy, Shape], Attributes]] = {
    "": _same({}),
    "no attribute": _same({}),
    "no post-op": _same({}),
    "relu": _chain(post_ops.relu()),
    "gelu_erf": _chain(post_ops.gelu_erf()),
    "relu, linear, gelu_erf": _chain(post_ops.relu(), post_ops.linear(2.0, -0.5), post_ops.gelu_erf()),
    **{name: partial(_added, pattern) for name, pattern in PATTERNS.items()},
    "where": _where,
    "logit_scale": _same({"logit_scale": 0.125}),
    "result_scale": _same({"result_scale": 3.0}),
    "out_scale": _same({"out_scale": 3.0}),
    "out_scale 1/127": _same({"out_scale": 1 / 127}),
    "out_scale 1/255": _same({"out_scale": 1 / 255}),
    "dropout": _same({"dropout": Dropout(DROPPED, seed=1)}),
    "dropout and mask": _same({"dropout": Dropout(DROPPED, seed=1, mask=True)}),
    "stats": _same({"stats": True}),
    "result_scale, mul, relu": _gated,
}


def leading(value: Any, rows: int, rank: int) -> Any:
    """The first rows of what broadcasts to an array of this rank."""
    if isinstance(value, post_ops.PostOp):
        operands = tuple(leading(each, rows, rank) for each in value.operands)
        return post_ops.PostOp(value.name, value.alpha, value.beta, operands)
    has_rows = isinstance(value, np.ndarray) and value.ndim == rank and len(value) > 1
    return value[:rows] if has_rows else value

"""The operators: one file a family. An operator is a NumPy function, whose body is the float64 reference.

Imports `contract`.
"""

from collections.abc import Iterator

from opgrad.contract import IN_GRAPHS, IN_LOSSES, ON_CPU, ON_SHARDS, Operator, declared
from opgrad.contract.declaration import EVERYWHERE, Support
from opgrad.ops import (
    activation,
    arithmetic,
    attention,
    convolution,
    cross_entropy,
    dropout,
    indexing,
    loss,
    normalization,
    optimizer,
    pooling,
    quantized,
    recurrent,
    several,
    softmax,
)

# In the order of the documentation.
_MODULES = (
    softmax,
    cross_entropy,
    activation,
    indexing,
    arithmetic,
    dropout,
    attention,
    loss,
    normalization,
    convolution,
    recurrent,
    pooling,
    several,
    optimizer,
    quantized,
)
FAMILIES = tuple(module.__name__.rpartition(".")[2] for module in _MODULES)


def operators() -> dict[str, Operator]:
    """The operators that every front end and device has, by name, in the order of the documentation."""
    return dict(_with(EVERYWHERE))


def tensor_operators() -> dict[str, Operator]:
    """The operators that PyTorch's and JAX's arrays have, by name: those of `operators`, and those on the CPU alone."""
    return dict(_with(EVERYWHERE, ON_CPU))


def graph_operators() -> dict[str, Operator]:
    """The other operators that are called by themselves: on the CPU alone, of training graphs, and on shards."""
    return dict(_with(ON_CPU, IN_GRAPHS, ON_SHARDS))


def public_operators() -> dict[str, Operator]:
    """All operators that are called by themselves, by name: those of `operators`, then the others."""
    return operators() | graph_operators()


def loss_operators() -> dict[str, Operator]:
    """The operators that the functions of losses are made of, by name."""
    return dict(_with(IN_LOSSES))


def _with(*support: Support) -> Iterator[tuple[str, Operator]]:
    known = [op for op in declared().values() if op.family in FAMILIES and op.support in support]
    return ((op.name, op) for op in sorted(known, key=lambda op: FAMILIES.index(op.family)))

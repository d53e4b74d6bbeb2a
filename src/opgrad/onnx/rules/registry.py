"""The gradient rules of operators, and the decorator with which users add their own."""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import HALVES
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.node import NoGradient as NoGradient

Gradients: TypeAlias = Value | Sequence[Value | None] | None
Rule: TypeAlias = Callable[[Node], Gradients]

ALL_INPUTS = range(2**31)


@dataclass(frozen=True)
class Declared:
    """The rule of an operator.

    name, domain: the operator's. rule: returns the gradients of the inputs, in order; None for an input without one.
    constant: the indices of inputs that have no gradient.
    replaces: the rule is a decomposition: it writes the node with other operators and returns their results; these
    operators replace the node and are differentiated in its place.
    recomputes: the rule is a decomposition, but the node stays: the backward part computes the other operators from the
    node's inputs, and differentiates them.
    direct: for an operator that recomputes, the rule that is used if no gradient is needed but those of the inputs at
    its indices; None from it leaves the work to the formula.
    integers: the rule also holds for integers that stand for floats (see `reach.quantized`), because the operator
    copies or selects them and does not compute with them.
    """

    name: str
    domain: str
    rule: Rule
    constant: Collection[int] = ()
    replaces: bool = False
    recomputes: bool = False
    integers: bool = False
    direct: tuple[Collection[int], Rule] | None = None


RULES: dict[tuple[str, str], Declared] = {}


def gradient(
    *names: str, domain: str = "", constant: Collection[int] = (), integers: bool = False
) -> Callable[[Rule], Rule]:
    """Register a function as the gradient rule of these operators; see `Declared`."""
    return _declaration(names, domain, constant=constant, integers=integers)


def formula(names: str, text: str, rule: Rule, **options: Any) -> None:
    """Register a gradient rule of one expression for operators, with blanks between them.

    text: the formula. options: of `gradient`.
    """
    rule.__doc__ = text
    gradient(*names.split(), **options)(rule)


def decomposition(*names: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a function that writes these operators with others, which are then differentiated."""
    return _declaration(names, domain, replaces=True)


def recomputed(
    *names: str, domain: str = "", constant: Collection[int] = (), integers: bool = False,
    direct: tuple[Collection[int], Rule] | None = None,
) -> Callable[[Rule], Rule]:  # fmt: skip
    """Register a function that writes these operators with others, through which their gradients are computed."""
    return _declaration(names, domain, constant=constant, integers=integers, direct=direct, recomputes=True)


def in_float32(rule: Rule) -> Rule:
    """The same decomposition, computed in float32 where the node has halves; results are rounded once."""

    @functools.wraps(rule)
    def wide(node: Node) -> Gradients:
        given = rule(node.wide())
        results = [given] if isinstance(given, Value) else list(given or [])
        dtypes = [None if each is None else each.element_type for each in node.outputs]
        pairs = itertools.zip_longest(results, dtypes[: len(results)])
        return [each if each is None or dtype not in HALVES else each.cast(dtype) for each, dtype in pairs]

    return wide


def _declaration(names: Sequence[str], domain: str, **options: Any) -> Callable[[Rule], Rule]:
    def declare(rule: Rule) -> Rule:
        for name in names:
            RULES[domain, name] = Declared(name, domain, rule, **options)
        return rule

    return declare


def register_gradient(name: str, domain: str = "", *, constant: Collection[int] = ()) -> Callable[[Rule], Rule]:
    """Decorate a function with this to make it the gradient rule of an operator, in place of the one there is.

    name, domain: the operator's; the domain is "" for those of ai.onnx.
    constant: indices of inputs that have no gradient, such as a mask.

    The function gets an `opgrad.gradients.Node` and returns the gradient of the only input, or a list of those of
    all inputs, in their order, None for those that have none. What nobody needs is left out of the graph afterwards.
    Raises TypeError unless name and domain are text and what is decorated can be called.

    Example:

        @register_gradient("Cube", "my.domain")
        def cube(node):
            return node.dy * 3 * node.x * node.x
    """
    if not isinstance(name, str) or not isinstance(domain, str):
        raise TypeError(f"register_gradient: name is {name!r} and domain {domain!r}, expected text")
    declare = _declaration([name], "" if domain == "ai.onnx" else domain, constant=constant, integers=True)

    def checked(rule: Rule) -> Rule:
        if not callable(rule):
            raise TypeError(f"register_gradient: the rule of {name} is of type {type(rule).__name__}, no function")
        return declare(rule)

    return checked

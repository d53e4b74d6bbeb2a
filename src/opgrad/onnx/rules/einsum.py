"""Einstein summation."""

import string
from collections.abc import Sequence
from dataclasses import dataclass

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.sizes import Size, are_equal
from opgrad.onnx.rules.node import Node, broadcast_to, sizes_of, unbroadcast
from opgrad.onnx.rules.registry import Gradients, NoGradient, gradient

REST = "..."  # the axes without a letter, which are broadcast against each other


@dataclass(frozen=True)
class _Equation:
    """An equation with one letter for each axis of the operands and the result. rest: the letters that `...` became."""

    terms: Sequence[str]
    result: str
    rest: str

    def unused(self, count: int) -> str:
        """Letters that the equation does not have."""
        return "".join(each for each in string.ascii_letters if each not in "".join((*self.terms, self.result)))[:count]


@gradient("Einsum")
def einsum(node: Node) -> Gradients:
    """dx = einsum of dy and all other operands, to the axes of x; an axis that is there twice gets a diagonal."""
    equation = _parsed(node)
    return [_gradient_of(node, equation, place) if place in node.needed else None for place in range(len(node.inputs))]


def _parsed(node: Node) -> _Equation:
    text = node.get("equation").replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(node.inputs):
        raise NoGradient(f"its equation {text!r} has {len(terms)} operands, the node {len(node.inputs)}")
    if not arrow:
        letters = left.replace(REST, "").replace(",", "")
        result = (REST if REST in left else "") + "".join(sorted(each for each in letters if letters.count(each) == 1))
    count = [node.rank(place) - len(term.replace(REST, "")) if REST in term else 0 for place, term in enumerate(terms)]
    rest = _Equation(terms, result, "").unused(max(count))
    written = [term.replace(REST, rest[len(rest) - own :]) for term, own in zip(terms, count, strict=True)]
    return _Equation(written, result.replace(REST, rest), rest)


def _gradient_of(node: Node, equation: _Equation, place: int) -> Value:
    """The gradient of one operand."""
    x, others = node.required(place), [index for index in range(len(equation.terms)) if index != place]
    terms, operands = [equation.terms[index] for index in others], [node.required(index) for index in others]
    if equation.result:
        terms, operands = [equation.result, *terms], [node.dy, *operands]
    own = _distinct(equation, place, x, terms, operands)
    there = "".join(terms)
    kept = "".join(each for each in own if each in there)
    sizes, sizes_of_x = _sizes(terms, operands), dict(zip(own, sizes_of(x), strict=True))
    dx = node.body.node("Einsum", *operands, equation=f"{','.join(terms)}->{kept}") if operands else node.dy
    dx = dx if equation.result or not operands else dx * node.dy
    alone = [index for index, each in enumerate(own) if each not in there]
    if alone:
        dots = [each for each in equation.rest if each in kept and sizes[each] != 1]
        open_ = [each for each in dots if not are_equal([sizes_of_x[each]], [sizes[each]])]
        if any(not isinstance(sizes_of_x[each], int) for each in open_):
            raise NoGradient("the graph does not tell which axes of the dots are broadcast")
        summed = [kept.index(each) for each in open_]
        dx = dx.sum(summed) if summed else dx
        return broadcast_to(dx.unsqueeze(*alone) if kept else dx, x)
    whole = [sizes[each] if each in equation.rest or size == 1 else size for each, size in sizes_of_x.items()]
    return unbroadcast(dx, node.with_sizes(dx, whole), x)


def _distinct(equation: _Equation, place: int, x: Value, terms: list[str], operands: list[Value]) -> str:
    """The letters of an operand, made distinct: for a repeated letter an identity matrix is added to the operands."""
    term, own = equation.terms[place], ""
    for axis, each in enumerate(term):
        if each not in own:
            own += each
            continue
        new = _Equation([*equation.terms, own, *terms], equation.result, "").unused(1)
        size, body = x.shape(axis, axis + 1), x.body
        terms.append(each + new)
        operands.append(body.number(0, x).expand(body.concat(size, size)).apply("EyeLike"))
        own += new
    return own


def _sizes(terms: Sequence[str], operands: Sequence[Value]) -> dict[str, Size]:
    """The size of each letter's axis, that of the operand which is not broadcast along it."""
    found: dict[str, Size] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, operand.sizes or [None] * len(term), strict=True):
            if found.get(letter, 1) == 1:
                found[letter] = size
    return found

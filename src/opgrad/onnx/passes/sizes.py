"""Symbolic arithmetic of shapes: the values of a graph's integer arrays as numbers and products of named sizes.

And what follows from it: constant shapes, and Slices and Gathers that together take all of a value as one Split.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import attributes_of, registering


@dataclass(frozen=True)
class Term:
    """The product of a number and the named sizes; the names are sorted."""

    factor: int
    names: tuple[str, ...] = ()

    def __mul__(self, other: "Term") -> "Term":
        return Term(self.factor * other.factor, tuple(sorted(self.names + other.names)) if self.factor else ())

    @property
    def number(self) -> int | None:
        """The number if there are no names, else None."""
        return None if self.names else self.factor


Terms: TypeAlias = list[Term | None]  # None for a size of which nothing is known


def numbers(found: Terms | None) -> list[int] | None:
    """The numbers of terms; None if one of them has a name or is unknown."""
    if found is None or any(each is None or each.names for each in found):
        return None
    return [each.factor for each in found if each is not None]


LONGEST = 64  # the most numbers of an array that is taken for a shape

Rule = Callable[["Shapes", onnx.NodeProto], Terms | None]
RULES: dict[str, Rule] = {}


def terms_of(graph: Graph, name: str) -> Terms | None:
    """The sizes of a value; None if not even the rank is known."""
    if (sizes := graph.sizes(name)) is None:
        return None
    return [Term(1, (size,)) if isinstance(size, str) else None if size is None else Term(size) for size in sizes]


# Registers the function that computes the result of these operators from the sizes in their inputs.
rule = registering(RULES)


class Shapes:
    """The values of integer arrays with at most one axis, as far as they follow from sizes."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._found: dict[str, Terms | None] = {}

    def __call__(self, name: str) -> Terms | None:
        if name not in self._found:
            self._found[name] = None  # ends the recursion in a damaged model whose nodes form a circle
            self._found[name] = self._value(name)
        return self._found[name]

    def _value(self, name: str) -> Terms | None:
        constant = self.graph.constant(name)
        if constant is not None:
            fits = constant.dtype.kind in "iub" and constant.ndim <= 1 and constant.size <= LONGEST
            return [Term(int(each)) for each in constant.reshape(-1)] if fits else None
        node = self.graph.maker(name, *RULES)
        return RULES[node.op_type](self, node) if node is not None else None

    def numbers(self, name: str) -> list[int] | None:
        """The numbers in an array; None if one of them is not known."""
        return numbers(self(name)) if name else None


@rule("Shape")
def _shape(shapes: Shapes, node: onnx.NodeProto) -> Terms | None:
    sizes, given = terms_of(shapes.graph, node.input[0]), attributes_of(node)
    return None if sizes is None else sizes[given.get("start", 0) : given.get("end", len(sizes))]


rule("Size")(lambda shapes, node: _product(terms_of(shapes.graph, node.input[0])))
rule("ReduceProd")(lambda shapes, node: _product(shapes(node.input[0])))


def _product(terms: Terms | None) -> Terms | None:
    if terms is None or None in terms:
        return None
    return [math.prod((each for each in terms if each is not None), start=Term(1))]


@rule("Identity", "Cast")
def _same(shapes: Shapes, node: onnx.NodeProto) -> Terms | None:
    whole = attributes_of(node).get("to") in (None, onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    return shapes(node.input[0]) if whole else None


@rule("Unsqueeze", "Squeeze", "Reshape")
def _elements(shapes: Shapes, node: onnx.NodeProto) -> Terms | None:
    sizes = shapes.graph.sizes(node.output[0])
    return shapes(node.input[0]) if sizes is not None and len(sizes) <= 1 else None


@rule("Concat")
def _concat(shapes: Shapes, node: onnx.NodeProto) -> Terms | None:
    joined: Terms = []
    for name in node.input:
        part = shapes(name)
        sizes = shapes.graph.known(name)
        if part is None and (sizes is None or len(sizes) != 1 or sizes[0] > LONGEST):
            return None
        joined += [None] * (sizes or [0])[0] if part is None else part
    return joined


@rule("Gather")
def _gather(shapes: Shapes, node: onnx.NodeProto) -> Terms | None:
    whole, places = shapes(node.input[0]), shapes.numbers(node.input[1])
    if whole is None or places is None or any(not -len(whole) <= index < len(whole) for index in places):
        return None
    return [whole[index] for index in places]


@rule("Slice")
def _slice(shapes: Shapes, node: onnx.NodeProto) -> Terms | None:
    whole, limits = shapes(node.input[0]), slice_limits(shapes, node)
    if whole is None or limits is None or len(limits) != 1:
        return None
    start, end, step = (numbers([each]) for each in limits[0][1:])
    if start is None or end is None or step is None or not step[0]:
        return None
    # ONNX clips an end before the first element to the first element; a Python slice does so with None.
    last = None if step[0] < 0 and end[0] < -len(whole) else end[0]
    return whole[start[0] : last : step[0]]


def slice_limits(shapes: Shapes, node: onnx.NodeProto) -> list[tuple[int, Term | None, Term | None, Term]] | None:
    """For each axis that Slice cuts: the axis, start, end and step; None if axes or steps are not known."""
    given = attributes_of(node)
    if "starts" in given:
        starts, ends = ([Term(each) for each in given[name]] for name in ("starts", "ends"))
        axes = given.get("axes", list(range(len(starts))))
        return [(axis, *pair, Term(1)) for axis, *pair in zip(axes, starts, ends, strict=True)]
    first, last = (shapes(name) for name in node.input[1:3])
    if first is None or last is None or len(first) != len(last):
        return None
    axes = shapes.numbers(node.input[3]) if len(node.input) > 3 and node.input[3] else list(range(len(first)))
    steps = shapes.numbers(node.input[4]) if len(node.input) > 4 and node.input[4] else [1] * len(first)
    if axes is None or steps is None or not len(axes) == len(steps) == len(first):
        return None
    return [(axis, a, b, Term(step)) for axis, a, b, step in zip(axes, first, last, steps, strict=True)]


def elementwise(op: str, function: Callable[..., Term | None], unknown: bool = False) -> None:
    """Register the function of corresponding elements of an operator's arrays, which are broadcast.

    unknown: whether it also takes elements that are not known.
    """

    def elements(shapes: Shapes, node: onnx.NodeProto) -> Terms | None:
        lists = [each for name in node.input if (each := shapes(name)) is not None]
        length = max(map(len, lists), default=0)
        if len(lists) < len(node.input) or any(len(each) not in (1, length) for each in lists):
            return None
        tuples = zip(*(each * length if len(each) < length else each for each in lists), strict=True)
        return [None if None in each and not unknown else function(*each) for each in tuples]

    rule(op)(elements)


def _quotient(a: Term, b: Term) -> Term | None:
    rest = list(a.names)
    for name in b.names:
        if name not in rest:
            return None
        rest.remove(name)
    if b.names or b.factor <= 0 or a.factor < 0:  # a named size as divisor may be 0
        return None
    whole = not rest or a.factor % b.factor == 0
    return Term(a.factor // b.factor, tuple(rest)) if whole else None


def _sum(a: Term, b: Term, sign: int) -> Term | None:
    if a.names == b.names:
        total = a.factor + sign * b.factor
        return Term(total, a.names if total else ())
    return a if b == Term(0) else b if a == Term(0) and sign > 0 else None


def _equal(a: Term, b: Term) -> Term | None:
    if not a.names and not b.names:
        return Term(int(a.factor == b.factor))
    negative = any(not each.names and each.factor < 0 for each in (a, b))
    return Term(0) if negative and min(a.factor, b.factor) < 0 < max(a.factor, b.factor) else None


def _chosen(condition: Term | None, a: Term | None, b: Term | None) -> Term | None:
    return None if condition is None or condition.names else a if condition.factor else b


elementwise("Mul", lambda a, b: a * b)
elementwise("Div", _quotient)
elementwise("Add", lambda a, b: _sum(a, b, 1))
elementwise("Sub", lambda a, b: _sum(a, b, -1))
elementwise("Equal", _equal)
elementwise("Where", _chosen, unknown=True)


@rule("ConstantOfShape")
def _filled(shapes: Shapes, node: onnx.NodeProto) -> Terms | None:
    shape, given = shapes.numbers(node.input[0]), attributes_of(node).get("value")
    value = np.zeros(1) if given is None else onnx.numpy_helper.to_array(given)
    if shape is None or len(shape) > 1 or value.dtype.kind not in "iub" or math.prod(shape) > LONGEST:
        return None
    return [Term(int(value.reshape(-1)[0]))] * math.prod(shape)


INTEGERS = (TensorProto.INT64, TensorProto.INT32)
COPY, REST = 0, -1  # in the shape of Reshape: a size to copy, and the size that follows from the others


def simplify_shapes(graph: Graph) -> bool:
    """Replace arrays of known sizes, and the shapes that Reshape reads, by initializers."""
    shapes, changed = Shapes(graph), False
    for node in list(graph.nodes()):
        if node.op_type not in RULES or domain_of(node) or not node.output:
            continue
        name, found = node.output[0], None
        holds_integers = graph.element_type(name) in INTEGERS
        sizes = graph.sizes(name) if holds_integers else None
        if holds_integers and node.op_type == "Where" and graph.readers.get(name):
            found = shapes(name)
        if found is not None and None not in found:  # one of its operands, if it holds the same sizes
            equal = [each for each in node.input[1:] if shapes(each) == found and graph.sizes(each) is not None]
            same = [each for each in equal if len(graph.sizes(each) or ()) == len(sizes or ())]
            if same and graph.alias(name, same[0]):
                changed = True
                continue
        if sizes is not None and len(sizes) < 2 and len(node.output) == 1 and name not in graph.kept:
            known = numbers(shapes(name))
            if known is not None:
                dtype = helper.tensor_dtype_to_np_dtype(graph.element_type(name) or TensorProto.INT64)
                array = np.array(known if sizes else known[0], dtype)
                graph.become_constants(node, {name: numpy_helper.from_array(array)})
                changed = True
        elif node.op_type == "Reshape":
            changed |= _target(graph, shapes, node)
    return changed


def _target(graph: Graph, shapes: Shapes, node: onnx.NodeProto) -> bool:
    """Give Reshape a constant shape, with 0 for sizes that stay and -1 for one size that follows from the others."""
    if len(node.input) < 2 or graph.constant(node.input[1]) is not None:
        return False
    wanted = shapes(node.input[1])
    if wanted is None or attributes_of(node).get("allowzero"):
        return False
    sizes, target = terms_of(graph, node.input[0]) or [], list[int]()
    for index, term in enumerate(wanted):
        kept = term is not None and index < len(sizes) and term == sizes[index]
        number = term.number if term is not None else None
        target.append(number if number is not None else COPY if kept else REST)
    empty = any(term == Term(0) and sizes[index : index + 1] in ([], [term]) for index, term in enumerate(wanted))
    if empty or target.count(REST) > 1:
        return False
    shape = graph.add_constant(np.array(target, np.int64), f"{node.output[0]}/shape")
    inputs = [node.input[0], shape]
    graph.substitute(node, [helper.make_node("Reshape", inputs, node.output, node.name)])
    return True


SIZES_ARE_INPUT = 13  # the first opset whose Split and Squeeze have them as an input


@dataclass(frozen=True)
class AxisPart:
    """The elements from start to before end along an axis, which a node takes. squeezed: the result lacks the axis."""

    node: onnx.NodeProto
    axis: int
    start: int
    end: int
    squeezed: bool = False


def split_parts(graph: Graph) -> bool:
    """Replace the Slices and Gathers that together take every element of a value once by one Split."""
    changed, shapes = False, Shapes(graph)
    for name in list(graph.readers):
        parts = [part for node in graph.readers[name] if (part := _part(graph, shapes, node, name)) is not None]
        for axis in sorted({part.axis for part in parts}):
            chosen = sorted((part for part in parts if part.axis == axis), key=lambda part: part.start)
            ends, starts = [0, *(each.end for each in chosen)], [each.start for each in chosen]
            is_whole = ends == [*starts, (graph.sizes(name) or [])[axis]]
            if len(chosen) > 1 and is_whole and all(each.start < each.end for each in chosen):
                _write(graph, name, chosen)
                changed = True
                break
    return changed


def _part(graph: Graph, shapes: Shapes, node: onnx.NodeProto, name: str) -> AxisPart | None:
    sizes = graph.sizes(name)
    if domain_of(node) or sizes is None or node.op_type not in ("Slice", "Gather") or node.input[0] != name:
        return None
    is_gather = node.op_type == "Gather"
    if is_gather:
        index, axis = graph.constant(node.input[1]), attributes_of(node).get("axis", 0)
        ends = [] if index is None or index.ndim else [int(index), int(index) + 1]
    else:
        limits = slice_limits(shapes, node)
        axis, *found = limits[0] if limits is not None and len(limits) == 1 else (0,)
        ends = [each.number for each in found if each is not None and each.number is not None]
        ends = ends[:2] if len(ends) == 3 and ends[2] == 1 else []
    size = sizes[axis] if -len(sizes) <= axis < len(sizes) else None
    if not ends or not isinstance(size, int):
        return None
    if is_gather:
        start = ends[0] % size if -size <= ends[0] < size else size
        return AxisPart(node, axis % len(sizes), start, start + 1, squeezed=True)
    start, end = (min(max(each + size if each < 0 else each, 0), size) for each in ends)
    return AxisPart(node, axis % len(sizes), start, end)


def _write(graph: Graph, name: str, parts: list[AxisPart]) -> None:
    order = {id(node): index for index, node in enumerate(graph.nodes())}
    first = min((part.node for part in parts), key=lambda node: order[id(node)])
    outputs = [graph.free(f"{name}/part") if part.squeezed else part.node.output[0] for part in parts]
    sizes = np.array([part.end - part.start for part in parts])
    lengths = [graph.add_constant(sizes, f"{name}/split")] if graph.opset >= SIZES_ARE_INPUT else []
    attributes = {} if lengths else {"split": sizes.tolist()}
    split = graph.node("Split", [name, *lengths], outputs, axis=parts[0].axis, **attributes)
    new = [split]
    for part, output in zip(parts, outputs, strict=True):
        if part.node is not first:
            graph.substitute(part.node, [])
        if part.squeezed:  # the Split's result has the axis, of size 1
            own = [1 if axis == part.axis else size for axis, size in enumerate(graph.sizes(name) or [])]
            graph.declare(output, graph.element_type(name) or onnx.TensorProto.FLOAT, own)
            if graph.opset >= SIZES_ARE_INPUT:
                axes = graph.add_constant(np.array([part.axis]), f"{output}/axes")
                new.append(graph.node("Squeeze", [output, axes], part.node.output))
            else:
                new.append(graph.node("Squeeze", [output], part.node.output, axes=[part.axis]))
    graph.substitute(first, new)

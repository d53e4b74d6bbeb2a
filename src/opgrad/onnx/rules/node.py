"""What a gradient rule is given and how it is declared: `Node`, `gradient` and the other decorators.

A node's inputs and outputs are values for formulas. What was broadcast is summed, what was reshaped gets its shape
back: shapes that are known from the graph become constants, and Reshape itself finds one unknown size, so that a single
unknown size needs no arithmetic at run time either. The gradient of a sequence is one of as many tensors, of the same
shapes.
"""

import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import Body, GraphBody, NodeView, Value, widened
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, HALVES, MICROSOFT, domain_of
from opgrad.onnx.graph.nodes import attributes_of, outside
from opgrad.onnx.graph.sizes import Sizes, are_equal, known


class NoGradient(NotImplementedError):
    """This node has no gradient; the text says why, and what helps."""


class Instead(Exception):
    """A node is differentiated as other nodes that compute the same, and that replace it in the forward graph."""

    def __init__(self, nodes: Sequence[onnx.NodeProto]):
        self.nodes = list(nodes)


class NotKept(NoGradient):
    """A value that the gradient reads cannot be kept by the node that makes it."""


def zero_tensors(value: Value) -> Value:
    """A sequence of zeros in the shapes of the tensors of another sequence."""
    zero = helper.make_tensor("", value.element_type or TensorProto.FLOAT, [1], [0])

    def step(inner: Body, tensor: Value) -> list[Value]:
        return [tensor.apply("Shape").apply("ConstantOfShape", value=zero)]

    return _with_dtype_of(value.body.each([value], step)[0], value)


def added_tensors(one: Value, other: Value) -> Value:
    """The sums of the tensors of two sequences."""
    return _with_dtype_of(one.body.each([one, other], lambda inner, a, b: [a + b])[0], one)


def appended_tensors(value: Value, more: Value) -> Value:
    """A sequence with the tensors of another one behind its own."""
    first = np.array(0)

    def step(inner: Body, result: Value, rest: Value) -> list[Value]:
        tensor = inner.node("SequenceAt", rest, inner.constant(first))
        return [inner.node("SequenceInsert", result, tensor), inner.node("SequenceErase", rest, inner.constant(first))]

    body = value.body
    return _with_dtype_of(body.loop(body.node("SequenceLength", more), [value, more], step)[0], value)


def tensors_from(value: Value, start: Value, count: Value) -> Value:
    """So many tensors of a sequence, from the place `start` on."""
    body = value.body

    def step(inner: Body, result: Value, place: Value) -> list[Value]:
        tensor = inner.node("SequenceAt", inner.outer(value), place)
        return [inner.node("SequenceInsert", result, tensor), place + 1]

    dtype = value.element_type or TensorProto.FLOAT
    empty = Value(body, body.node("SequenceEmpty", dtype=dtype).name, dtype)
    return _with_dtype_of(body.loop(count, [empty, start], step)[0], value)


def _with_dtype_of(value: Value, other: Value) -> Value:
    return Value(value.body, value.name, other.element_type)


def sizes_of(value: Value) -> Sizes:
    """The sizes of a value. Raises NoGradient if not even its rank is known."""
    if value.sizes is None:
        raise NoGradient(f"the rank of {value.name!r} is not known; declare its shape in the graph's value_info")
    return value.sizes


def numbers_of(value: Value, *axes: int) -> list[int]:
    """The sizes along some axes. Raises NoGradient where the graph does not tell one as a number."""
    sizes = sizes_of(value)
    if (found := known([sizes[axis] for axis in axes])) is None:
        raise NoGradient(f"the sizes of {value.name!r} are {list(sizes)}, expected numbers along axes {list(axes)}")
    return found


def reshape_like(value: Value, like: Value) -> Value:
    """The elements in the shape of another value."""
    if are_equal(value.sizes, like.sizes):
        return value
    target = [0] if like.sizes is None else [size if isinstance(size, int) else -1 for size in like.sizes]
    if 0 in target or target.count(-1) > 1:  # Reshape takes 0 for a size to copy, and finds one size
        return value.in_shape(like.shape())
    return value.reshape(target)


def transposed(value: Value, rank: int | None = None) -> Value:
    """The value with its last two axes exchanged. rank: if the value does not tell its own."""
    rank = len(sizes_of(value)) if rank is None else rank
    return value.transpose(*range(rank - 2), rank - 1, rank - 2)


def unbroadcast(value: Value, whole: Value, target: Value) -> Value:
    """Sum a gradient in the shape of `whole` to the shape of `target`, which had been broadcast to that shape."""
    if target.name == whole.name:
        return value
    axes = _summed(whole.sizes, target.sizes)
    if axes is None:
        body, attributes = value.body, {"keepdims": 1, "noop_with_empty_axes": 1}
        at_run_time = body.nodes_of("BroadcastGradientArgs", 2, target.shape(), whole.shape(), domain=MICROSOFT)[0]
        if body.axes_are_inputs("ReduceSum"):
            total = body.node("ReduceSum", value, at_run_time, **attributes)
        else:
            total = body.node("ReduceSumTraining", value, at_run_time, domain=MICROSOFT, **attributes)
        return total.reshape(target.shape())
    if not axes:
        return value
    lead = len(whole.sizes or ()) - len(target.sizes or ())
    if lead == 0:
        return value.sum(axes)
    if axes == list(range(lead)):
        return value.sum(axes, keepdims=False)
    return reshape_like(value.sum(axes, keepdims=False), target)


def _summed(whole: Sizes | None, target: Sizes | None) -> list[int] | None:
    """The axes along which a value was broadcast; None if the sizes do not tell."""
    if whole is None or target is None or len(whole) < len(target):
        return None
    lead = len(whole) - len(target)
    axes = list(range(lead))
    for axis, (size, own) in enumerate(zip(whole[lead:], target, strict=True), lead):
        if own == 1 and size != 1:
            axes.append(axis)
        elif own != size or own is None:
            if isinstance(own, int):
                continue
            return None
    return axes


def element_count(value: Value, axes: Sequence[int] | None) -> int | None:
    """The number of elements along axes, along all if there are none given; None if it is not known."""
    if value.sizes is None:
        return None
    rank = len(value.sizes)
    if far := [axis for axis in axes or () if not -rank <= axis < rank]:
        raise ValueError(f"an axis is {far[0]}, expected one of a tensor with {rank} axes")
    numbers = known(value.sizes if axes is None else [value.sizes[axis] for axis in axes])
    return None if numbers is None else math.prod(numbers)


def ratio(part: Value, whole: Value, like: Value) -> Value:
    """The size of `part` divided by that of `whole`, at run time, in the type of `like`.

    The division is in float64, which represents all sizes exactly and does not fail if a value is empty.
    """
    return (part.size().cast(TensorProto.DOUBLE) / whole.size().cast(TensorProto.DOUBLE)).like(like)


# (graph, body, seeds, wanted): the gradients of the values `wanted` of a graph, written into `body`, by name; None for
# a value without one. seeds: the gradients of the values that are differentiated, by name.
Differentiate: TypeAlias = Callable[[Graph, GraphBody, Mapping[str, Value], Sequence[str]], dict[str, Value | None]]
AXES_PLACE = 1  # the index of the input with the axes, in opsets where axes are an input


class Node(NodeView):
    """A node of the forward graph whose gradient is being written.

    forward: the graph. body: where nodes are written to.
    inputs: the node's values, and behind them those that its subgraphs read from outside; None where an optional one
    is missing. names: their names. outputs: the node's results, likewise.
    differentiate: writes the gradients of the values of another graph, such as a subgraph of the node.
    dys: the gradients of the outputs; None for an output that no differentiated value depends on.
    needed: the indices of the inputs whose gradients are asked for.
    attributes: as the node has them, text decoded.
    opset: of ai.onnx, that of the graph.

    x, y, dy: the first of inputs, outputs and dys.
    """

    _problem = NoGradient
    body: GraphBody

    def __init__(
        self,
        proto: onnx.NodeProto,
        forward: Graph,
        body: GraphBody,
        dys: Sequence[Value | None],
        needed: Sequence[int],
        differentiate: Differentiate | None = None,
    ):
        self.differentiate = differentiate
        self.proto, self.body, self.dys, self.needed = proto, body, list(dys), frozenset(needed)
        self.opset = forward.opset
        self.attributes: Mapping[str, Any] = attributes_of(proto)
        self.forward = forward
        self.names = [*proto.input, *outside(proto)]
        self.inputs = [self.value(name) if name else None for name in self.names]
        self.outputs = [self.value(name) if name else None for name in proto.output]

    @property
    def x(self) -> Value:
        """The first input."""
        return self.required(0)

    @property
    def y(self) -> Value:
        """The first output."""
        return self.output(0)

    @property
    def dy(self) -> Value:
        """The gradient of the first output: zeros if no differentiated value depends on it."""
        return self.gradient(0)

    def gradient(self, index: int) -> Value:
        """The gradient of an output: zeros if no differentiated value depends on it."""
        found = self.dys[index] if index < len(self.dys) else None
        if found is None and self.forward.sequence(self.proto.output[index]):
            return zero_tensors(self.output(index))
        # The gradient of a quantized tensor's integers is a float; it has the type of the other outputs' gradients.
        like = None if self.output(index).element_type in (None, *FLOATS) else next(filter(None, self.dys), None)
        return found if found is not None else self.output(index).filled(0, like)

    def rank(self, index: int = 0) -> int:
        """The rank of an input. Raises NoGradient if the graph does not tell it."""
        return len(sizes_of(self.required(index)))

    def constant(self, index: int) -> np.ndarray | None:
        """The value of an input that is the same in every run, None if it is missing or is not."""
        value = self.input(index)
        return None if value is None else self.forward.constant(value.name)

    def output(self, index: int, suffix: str = "", element_type: int | None = None) -> Value:
        """An output; an optional output that the forward node lacks is added to it.

        suffix: what the new output's name adds to that of the first output. element_type: the new output's type, if it
        differs from that of the first output.
        """
        while len(self.outputs) <= index:
            self.outputs.append(None)
            self.proto.output.append("")
        found = self.outputs[index]
        if found is None:
            first = next(filter(None, self.proto.output))
            name = self.body.free(f"{first}{suffix or f'_{index}'}")
            dtype = element_type or self.forward.element_type(first) or TensorProto.FLOAT
            self.forward.declare(name, dtype, None)
            self.proto.output[index] = name
            found = self.outputs[index] = Value(self.body, name, dtype)
            if not onnx.defs.has(self.proto.op_type, domain_of(self.proto)):
                self.body.declare(found, dtype, None)  # onnx's shape inference does not know the operator
        return found

    def become(self, op: str, domain: str, **attributes: Any) -> None:
        """Change the forward node into one of another operator, with the same inputs and outputs."""
        self.proto.op_type, self.proto.domain = op, domain
        del self.proto.attribute[:]
        self.proto.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())

    def leads_to(self, *operators: str) -> bool:
        """Whether one of these operators reads the first output, as it is or in another type."""
        waiting = [self.proto.output[0]]
        while waiting:
            for node in self.forward.readers.get(waiting.pop(), ()):
                if node.op_type in operators:
                    return True
                if node.op_type in ("Cast", "CastLike", "Identity"):
                    waiting += node.output
        return False

    def value(self, name: str) -> Value:
        """A value of the forward graph by its name."""
        forward = self.forward
        return Value(self.body, name, forward.sequence(name) or forward.element_type(name), forward.sizes(name))

    def maker(self, name: str) -> onnx.NodeProto | None:
        """The node of the forward graph that makes a value, None if no node does."""
        return self.forward.producers.get(name)

    def axes(self) -> list[int] | Value | None:
        """The axes of a reduction and the like, counted from the first: an attribute or the second input.

        None if there are none; a value if they are computed at run time.
        """
        given = self.attributes.get("axes")
        if given is None and self.input(AXES_PLACE) is not None:
            known = self.constant(AXES_PLACE)
            if known is None:
                return self.input(AXES_PLACE)
            given = known.tolist()
        if given is None:
            return [] if self.get("noop_with_empty_axes", 0) else None
        return sorted(axis % max(self.rank(), 1) for axis in given) if min(given, default=0) < 0 else sorted(given)

    def kept(self, value: Value) -> Value:
        """A value of a reduction's shape, with the reduced axes back, of size 1."""
        axes = self.axes()
        if self.get("keepdims", 1) or axes is None:
            return value
        if isinstance(axes, Value):
            return self.body.node("Unsqueeze", value, axes)
        if not axes and not self.get("noop_with_empty_axes", 0):
            return value  # of shape (), which goes with all others
        return value.unsqueeze(*axes) if axes else value

    def where(self, condition: Value, x: Value | float, y: Value | float) -> Value:
        """x where the condition holds, y elsewhere."""
        return self.body.where(condition, x, y)

    def unbroadcast(self, value: Value, index: int, whole: Value | None = None) -> Value:
        """A gradient of the shape of the first output, summed to the shape of an input that was broadcast."""
        return unbroadcast(value, whole or self.y, self.required(index))

    def microsoft(self, op: str, *inputs: Value | None, **attributes: Any) -> Value:
        """A node of the domain com.microsoft with one output."""
        return self.body.microsoft(op, *inputs, **attributes)

    def results(self, op: str, outputs: int, *inputs: Value | None, **attributes: Any) -> list[Value]:
        """A node of the domain com.microsoft with several outputs."""
        return self.body.nodes_of(op, outputs, *inputs, domain=MICROSOFT, **attributes)

    def same(self, *inputs: Value | None, **changed: Any) -> Value:
        """The node's operator on other inputs, with its attributes except those given here."""
        attributes = {**self.attributes, **changed}
        return self.body.node(self.proto.op_type, *inputs, domain=self.proto.domain, **attributes)

    def declared(self, value: Value, index: int) -> Value:
        """The gradient of an input, cast to the input's type and declared in the graph with its sizes."""
        target = self.required(index)
        if self.forward.sequence(target.name):
            return value
        dtype = target.element_type if target.element_type in FLOATS else value.element_type
        if dtype is not None and value.element_type not in (dtype, None):
            value = value.cast(dtype)
        return self.body.declare(value, dtype or TensorProto.FLOAT, target.sizes)

    def wide(self) -> "Node":
        """The same node with its float16 and bfloat16 values cast to float32.

        A sum overflows float16 beyond 65,504, and float16 counts only to 2,048 exactly, bfloat16 to 256; sums of
        squares and counts would be wrong before they are divided. The gradient is rounded once, to the input's type.
        """
        other = copy.copy(self)
        other.inputs, other.outputs, other.dys = (
            [None if each is None else widened(each) for each in values]
            for values in (self.inputs, self.outputs, self.dys)
        )
        return other

    def on(self, *inputs: Value | None) -> "Node":
        """The same node on other inputs."""
        other = copy.copy(self)
        other.inputs = list(inputs)
        return other

    def with_sizes(self, value: Value, sizes: Sizes) -> Value:
        """The same value with sizes that the rule knows."""
        return Value(self.body, value.name, value.element_type, sizes)


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
    integers: the rule also holds for integers that stand for floats (see `expansion.quantized`), because the operator
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


def gradient(*names: str, domain: str = "", **options: Any) -> Callable[[Rule], Rule]:
    """Register a function as the gradient rule of these operators. options: of `Declared`."""

    def declare(rule: Rule) -> Rule:
        RULES.update({(domain, name): Declared(name, domain, rule, **options) for name in names})
        return rule

    return declare


# Register a function that writes operators with others: these replace them and are differentiated, or are computed
# once more by the backward part and differentiated there.
decomposition, recomputed = functools.partial(gradient, replaces=True), functools.partial(gradient, recomputes=True)


class _Names(dict[str, Any]):
    """What names in the text of a formula stand for; those that nothing else has are operators of one input."""

    def __missing__(self, name: str) -> Callable[[Value], Value]:
        return lambda value: value.apply(name.capitalize())


def _computed(text: str, attributes: Mapping[str, Any]) -> Rule:
    """The rule that computes what the text of a formula says; see `formula`."""
    code = compile(text, "formula", "exec")

    def rule(node: Node) -> Gradients:
        a, b, c = (node.input(index) for index in range(3))
        known = _Names(x=a, a=a, b=b, c=c, y=node.y, dy=node.dy, pi=math.pi, where=node.where, kept=node.kept)
        known["sum_to"] = lambda value, target: unbroadcast(value, node.y, target)
        known |= {name: node.get(name, default) for name, default in attributes.items()}
        exec(code, known)
        return [known.get("dx", known.get("da")), known.get("db"), known.get("dc")]

    return rule


def formula(
    names: str, text: str, rule: Rule | None = None, *, domain: str = "", constant: Collection[int] = (),
    integers: bool = False, **attributes: Any,
) -> None:  # fmt: skip
    """Register a gradient rule of one formula for operators, with blanks between them.

    text: the formula. Without a function for it, assignments, which are computed: of dx, or of da, db and dc, the
        gradients of x, or of the inputs a, b and c. They read these, y, dy, attributes, operators of one input in lower
        case, `where`, sum_to(value, a), which sums over what was broadcast, and kept(value), with the reduced axes.
    domain, constant, integers: of `gradient`. attributes: those that the text reads, with their defaults.
    """
    rule = rule or _computed(text, attributes)
    rule.__doc__, rule.__module__ = text, sys._getframe(1).f_globals["__name__"]  # the caller's, as of a namedtuple
    gradient(*names.split(), domain=domain, constant=constant, integers=integers)(rule)


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

    def checked(rule: Rule) -> Rule:
        if not callable(rule):
            raise TypeError(f"register_gradient: the rule of {name} is of type {type(rule).__name__}, no function")
        return gradient(name, domain="" if domain == "ai.onnx" else domain, constant=constant, integers=True)(rule)

    return checked

"""Write the body of an ONNX function as a formula: values with arithmetic that append nodes.

    body = Body(17)
    dy, x = body.input(), body.input()
    dx = body.where(x > 0, dy, 0)

Numbers beside a value take its element type: written so where it is known, else through CastLike, so that one body
serves every type. Values write operators of ai.onnx in the form of the body's opset: 16 or later for functions, 11 or
later for gradient graphs. In a gradient graph (`GraphBody`) a node that is written twice with the same inputs and
attributes exists once, constants are initializers, and the dtype of every value is known.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Union

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.facts import dtype_of_result
from opgrad.onnx.graph.messages import HALVES, MICROSOFT, comparable, copied, domain_of, free_name
from opgrad.onnx.graph.nodes import leave_out_results, needed, read_by, rename
from opgrad.onnx.graph.sizes import Sizes

Number = Union["Value", int, float]
LATEST_AXES_ATTRIBUTE = 17  # from the next opset on the axes of all reductions are an input …
LATEST_SUM_AXES_ATTRIBUTE = 12  # … and of these already from here
AXES_INPUT_EARLY = ("ReduceSum", "Squeeze", "Unsqueeze")
COUNT_IS_ATTRIBUTE = 18  # of Split
ALLOW_ZERO_FROM = 14  # from here on Reshape can take sizes of 0 as they are
FIRST_PART_OF_SHAPE = 15  # whose Shape gives a part of the sizes
MOST_NUMBERS = 1 << 20  # of an array of int64
LAST = np.iinfo(np.int64).max  # as the end of a slice: up to the last


def _of_value(op: str) -> Callable[["Value", Number], "Value"]:
    """The method for an operator of a value and a number or another value."""
    return lambda value, other: value.body.node(op, value, value.body.number(other, value))


def _of_number(op: str) -> Callable[["Value", Number], "Value"]:
    """The method for an operator whose first operand is a number."""
    return lambda value, other: value.body.node(op, value.body.number(other, value), value)


class Value:
    """A tensor inside a function or a graph, and what is known of it.

    element_type: a number of TensorProto.DataType. sizes: an int, the name of a size or None for each axis.
    """

    def __init__(
        self, body: "Body", name: str, element_type: int | None = None, sizes: Sequence[int | str | None] | None = None
    ):
        self.body, self.name, self.element_type, self.sizes = body, name, element_type, sizes

    def within(self, body: "Body") -> "Value":
        """The same value, for formulas that another body gets."""
        return Value(body, self.name, self.element_type, self.sizes)

    __add__, __radd__ = _of_value("Add"), _of_number("Add")
    __sub__, __rsub__ = _of_value("Sub"), _of_number("Sub")
    __mul__, __rmul__ = _of_value("Mul"), _of_number("Mul")
    __truediv__, __rtruediv__ = _of_value("Div"), _of_number("Div")
    __pow__, __gt__, __lt__ = _of_value("Pow"), _of_value("Greater"), _of_value("Less")
    __and__, __or__ = _of_value("And"), _of_value("Or")
    equals = _of_value("Equal")  # where both are the same

    def __neg__(self) -> "Value":
        return self.body.node("Neg", self)

    def __invert__(self) -> "Value":
        return self.body.node("Not", self)

    def apply(self, op: str, *others: "Value | None", **attributes: Any) -> "Value":
        """The operator of this name, of this input and others."""
        return self.body.node(op, self, *others, **attributes)

    def sum(self, axes: Union[Sequence[int], "Value", None] = None, keepdims: bool = True) -> "Value":
        """The sum over these axes, over all if there are none given; an empty array of axes sums nothing."""
        noop = {"noop_with_empty_axes": int(axes is not None)} if self.body.axes_are_inputs("ReduceSum") else {}
        return self.along("ReduceSum", axes, keepdims=int(keepdims), **noop)

    def mean(self, *axes: int) -> "Value":
        """The mean over these axes, which stay."""
        return self.along("ReduceMean", axes, keepdims=1)

    def along(self, op: str, axes: Union[Sequence[int], "Value", None], **attributes: Any) -> "Value":
        """The operator of this name over axes, which are its second input or an attribute."""
        if isinstance(axes, Value) or axes is None:
            return self.body.node(op, self, axes, **attributes)
        if self.body.axes_are_inputs(op):
            return self.body.node(op, self, self.body.ints(axes), **attributes)
        return self.body.node(op, self, axes=list(axes), **attributes)

    def product(self) -> "Value":
        """The product of all elements of a shape, as an array of one."""
        return self.body.concat(self.body.ints([1]), self).apply("ReduceProd", keepdims=1)

    def shape(self, start: int = 0, end: int | None = None) -> "Value":
        """The sizes from axis `start` to before axis `end`."""
        if self.sizes is not None and all(isinstance(size, int) for size in self.sizes[start:end]):
            return self.body.ints([size for size in self.sizes[start:end] if isinstance(size, int)])
        if (start or end is not None) and self.body.opset < FIRST_PART_OF_SHAPE:
            return self.body.node("Shape", self).slice(start, LAST if end is None else end)
        limits = {} if end is None else {"end": end}
        return self.body.node("Shape", self, **({"start": start} if start else {}), **limits)

    def size(self) -> "Value":
        """The number of elements, of shape ()."""
        return self.body.node("Size", self)

    def reshape(self, shape: Union[Sequence[int], "Value"]) -> "Value":
        """The elements in another shape; 0 keeps the size at its place, -1 is what remains."""
        return self.body.node("Reshape", self, self.body.ints(shape) if isinstance(shape, Sequence) else shape)

    def in_shape(self, shape: "Value") -> "Value":
        """The elements in another shape, in which from opset 14 on 0 is a size of 0."""
        return self.apply("Reshape", shape, **({"allowzero": 1} if self.body.opset >= ALLOW_ZERO_FROM else {}))

    def scalar(self) -> "Value":
        """The only element, of shape (): an array of one would give what it meets an axis."""
        return self.reshape([])

    def flatten(self, axis: int) -> "Value":
        """Two axes: those before `axis` and those from it on."""
        return self.body.node("Flatten", self, axis=axis)

    def unsqueeze(self, *axes: int) -> "Value":
        """With new axes of size 1."""
        return self.along("Unsqueeze", axes)

    def squeeze(self, *axes: int) -> "Value":
        """Without these axes of size 1."""
        return self.along("Squeeze", axes)

    def transpose(self, *permutation: int) -> "Value":
        """The axes in this order."""
        return self.body.node("Transpose", self, perm=list(permutation))

    def slice(self, start: Union[int, "Value"], end: Union[int, "Value"], axis: int = 0, step: int = 1) -> "Value":
        """The part from start to before end along one axis."""
        ends = [self.body.ints([each]) if isinstance(each, int) else each for each in (start, end)]
        return self.body.node("Slice", self, *ends, self.body.ints([axis]), self.body.ints([step]))

    def split(self, count: int, axis: int) -> list["Value"]:
        """So many equal parts along an axis."""
        number = {"num_outputs": count} if self.body.opset >= COUNT_IS_ATTRIBUTE else {}
        return self.body.nodes_of("Split", count, self, axis=axis, **number)

    def filled(self, number: float, like: "Value | None" = None) -> "Value":
        """One number in this shape, and in the element type of this value or another."""
        return self.body.number(number, like or self).expand(self.shape())

    def expand(self, shape: "Value") -> "Value":
        """Broadcast to this shape."""
        return self.body.node("Expand", self, shape)

    def cast(self, element_type: int) -> "Value":
        """In this element type, a number of TensorProto.DataType."""
        return self.body.node("Cast", self, to=element_type)

    def is_label(self, label: "Number") -> "Value":
        """Whether labels are this one, compared in int64 unless int32 holds it."""
        own = self.element_type or TensorProto.INT32
        dtype = comparable(own, label) if isinstance(label, int) else TensorProto.INT64
        return (self if dtype == own else self.cast(dtype)).equals(label)

    def like(self, other: "Value") -> "Value":
        """In the element type of another value."""
        if other.element_type is not None:
            return self if self.element_type == other.element_type else self.cast(other.element_type)
        return self.body.node("CastLike", self, other)


def widened(value: Value) -> Value:
    """A value of float16 or bfloat16 as float32, any other as it is."""
    if value.element_type not in HALVES:
        return value
    return Value(value.body, value.cast(TensorProto.FLOAT).name, TensorProto.FLOAT, value.sizes)


class Body:
    """The nodes of a function, for one opset of ai.onnx."""

    def __init__(self, opset: int, prefix: str = ""):
        self.opset, self._prefix = opset, prefix
        self.nodes: list[onnx.NodeProto] = []
        self._inputs = self._count = 0
        self._constants: dict[Any, Value] = {}

    def input(self) -> Value:
        """The function's next input."""
        self._inputs += 1
        return Value(self, f"{self._prefix}in{self._inputs - 1}")

    def nodes_of(self, op: str, outputs: int, *inputs: Value | None, **attributes: Any) -> list[Value]:
        """Append a node with several outputs."""
        names = [f"{self._prefix}v{self._count + index}" for index in range(outputs)]
        self._count += outputs
        given = ["" if each is None else each.name for each in inputs]
        while given and not given[-1]:
            given.pop()
        self.nodes.append(helper.make_node(op, given, names, **attributes))
        return [Value(self, name) for name in names]

    def _dtype(
        self, node: onnx.NodeProto, index: int, inputs: Sequence[Value | None], attributes: dict[str, Any]
    ) -> int | None:
        """The dtype of a result of a node, as far as that of the inputs tells it."""
        if node.op_type in ("If", "Loop"):
            return None  # their results have dtypes of their own
        if node.op_type == "Cast":
            return int(attributes["to"])
        dtype, of = dtype_of_result(domain_of(node), node.op_type, self.opset, index)
        like = inputs[of] if of < len(inputs) else None
        return dtype if dtype is not None or like is None else like.element_type

    def axes_are_inputs(self, op: str) -> bool:
        """Whether the axes of this operator are an input, no attribute."""
        return self.opset > (LATEST_SUM_AXES_ATTRIBUTE if op in AXES_INPUT_EARLY else LATEST_AXES_ATTRIBUTE)

    def node(self, op: str, *inputs: Value | None, **attributes: Any) -> Value:
        """Append a node with one output."""
        return self.nodes_of(op, 1, *inputs, **attributes)[0]

    def constant(self, array: np.ndarray) -> Value:
        """A constant; the same one is written once."""
        return self.tensor(numpy_helper.from_array(array))

    def tensor(self, tensor: TensorProto) -> Value:
        """A constant; the same one is written once, whatever its name was."""
        if tensor.name:
            tensor = copied(tensor)
            tensor.name = ""
        key = tensor.SerializeToString(deterministic=True)
        if key not in self._constants:
            self._constants[key] = self._write(tensor)
        return self._constants[key]

    def _write(self, tensor: TensorProto) -> Value:
        return self.node("Constant", value=tensor)

    def ints(self, numbers: Sequence[int]) -> Value:
        """An array of int64, such as a shape. Raises ValueError for more numbers than a few bytes may ask for."""
        if len(numbers) > MOST_NUMBERS:
            raise ValueError(f"an attribute asks for {len(numbers)} numbers, expected at most {MOST_NUMBERS}")
        return self.constant(np.array(numbers, np.int64))

    def number(self, value: Number, like: Value) -> Value:
        """A value as it is; a number in the element type of `like`."""
        if isinstance(value, Value):
            return value
        if like.element_type is not None:
            return self.tensor(helper.make_tensor("", like.element_type, (), [value]))
        kind = np.int64 if isinstance(value, int) else np.float64
        key = value, like.name
        if key not in self._constants:
            self._constants[key] = self.constant(np.array(value, kind)).like(like)
        return self._constants[key]

    def where(self, condition: Value, x: Number, y: Number) -> Value:
        """x where the condition holds, y elsewhere; one of them is a value."""
        like = x if isinstance(x, Value) else y
        assert isinstance(like, Value)
        return self.node("Where", condition, self.number(x, like), self.number(y, like))

    def concat(self, *values: Value, axis: int = 0) -> Value:
        """The values behind each other along an axis."""
        return self.node("Concat", *values, axis=axis)

    def full(self, shape: Value, number: float, like: Value) -> Value:
        """An array of one number, in the element type of `like`."""
        return self.number(number, like).expand(shape)

    def range(self, end: Value) -> Value:
        """0, 1, … up to before `end`, an int64 of shape ()."""
        return self.node("Range", self.constant(np.array(0)), end, self.constant(np.array(1)))

    def scan(
        self,
        states: Sequence[Value],
        sequences: Sequence[Value],
        step: Callable[..., tuple[Sequence[Value], Sequence[Value]]],
        backward: bool = False,
        rank: int | None = None,
    ) -> list[Value]:
        """The last states, and the sequences of what each iteration gives.

        step(inner, *states, *elements) writes into the body `inner` of the scan and gives new states and elements;
        values from outside go through `inner.outer`. The sequences run along axis 0, from the end if `backward`.
        rank: of states and elements, which onnxruntime must know; None leaves it to be found out from the graph.
        """
        inner = Body(self.opset, self.inner_prefix())
        taken = [inner.input() for _ in (*states, *sequences)]
        new, given = step(inner, *taken)
        results = [each.apply("Identity") for each in (*new, *given)]
        kinds = [each.element_type for each in (*states, *sequences)]
        inputs = [_declared(each, kind, rank) for each, kind in zip(taken, kinds, strict=True)]
        outputs = [_declared(each, kinds[0], rank) for each in results]
        attributes = {
            "num_scan_inputs": len(sequences),
            "scan_input_directions": [int(backward)] * len(sequences),
            "scan_output_directions": [int(backward)] * len(given),
            "body": helper.make_graph(inner.nodes, "body", inputs, outputs),
        }
        return self.nodes_of("Scan", len(results), *states, *sequences, **attributes)

    def inner_prefix(self) -> str:
        """What the names inside the next node with a body start with."""
        return f"{self._prefix}l{self._count}_"

    def each(self, sequences: Sequence[Value], step: Callable[..., Sequence[Value]]) -> list[Value]:
        """Sequences of the results of `step`, which gets the next tensor of every sequence.

        step(inner, *tensors) writes into the body `inner` of a loop; values from outside go through `inner.outer`.
        It gives as many tensors as it changes; they take the places of the first sequences.
        """

        def iterate(inner: Body, *carried: Value) -> list[Value]:
            first = inner.constant(np.array(0))
            tensors = [inner.node("SequenceAt", each, first) for each in carried]
            changed = step(inner, *tensors)
            # Each new tensor goes to the end, so that after as many iterations as there are tensors all are in order.
            rest = [inner.node("SequenceErase", each, first) for each in carried]
            new = [*changed, *tensors[len(changed) :]]
            return [inner.node("SequenceInsert", *pair) for pair in zip(rest, new, strict=True)]

        return self.loop(self.node("SequenceLength", sequences[0]), sequences, iterate)

    def outer(self, value: Value) -> Value:
        """A value of the body around this one."""
        return Value(self, value.name)

    def loop(self, count: Value, carried: Sequence[Value], step: Callable[..., Sequence[Value]]) -> list[Value]:
        """What `step(inner, *values)`, applied `count` times, makes of the carried values."""
        inner = Body(self.opset, self.inner_prefix())
        counter, go_on, *values = [inner.input() for _ in range(2 + len(carried))]
        results = [each.apply("Identity") for each in (go_on, *step(inner, *values))]
        inputs = [
            helper.make_tensor_value_info(counter.name, TensorProto.INT64, []),
            helper.make_tensor_value_info(go_on.name, TensorProto.BOOL, []),
            *(onnx.ValueInfoProto(name=each.name) for each in values),
        ]
        outputs = [onnx.ValueInfoProto(name=each.name) for each in results]
        graph = helper.make_graph(inner.nodes, "body", inputs, outputs)
        always = self.constant(np.array(True))
        return self.nodes_of("Loop", len(carried), count, always, *carried, body=graph)


def _declared(value: Value, element_type: int | None, rank: int | None) -> onnx.ValueInfoProto:
    """A value as an input or output of a body, with what is known of it."""
    if element_type is None:
        return onnx.ValueInfoProto(name=value.name)
    return helper.make_tensor_value_info(value.name, element_type, None if rank is None else [None] * rank)


class GraphBody(Body):
    """Nodes that are appended to a graph.

    opset: the version of ai.onnx, 11 or later. taken: the names that the graph has already; each new name is added.
    plain: whether all nodes will be lowered to ai.onnx in the end.
    """

    def __init__(self, opset: int, taken: set[str], plain: bool = False):
        super().__init__(opset)
        self.plain = plain
        self.initializers: list[TensorProto] = []
        self.infos: dict[str, onnx.ValueInfoProto] = {}
        self.taken = taken
        self._written: dict[Any, list[Value]] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._scope = ""

    def scope(self, name: str) -> None:
        """Let the names of all values that are written from now on start with `name`."""
        self._scope = self.free(name)
        self._count = 0

    def free(self, name: str) -> str:
        """A name that is not taken yet; from now on it is."""
        return free_name(name, self.taken)

    def beside(self) -> "GraphBody":
        """An empty body for the same graph, which takes its names from the same ones."""
        return GraphBody(self.opset, self.taken, self.plain)

    def nodes_of(self, op: str, outputs: int, *inputs: Value | None, **attributes: Any) -> list[Value]:
        """The outputs of a node; it is appended unless an equal node is already there."""
        given = ["" if each is None else each.name for each in inputs]
        while given and not given[-1]:
            given.pop()
        node = helper.make_node(op, given, [], **attributes)
        key = outputs, node.SerializeToString(deterministic=True)
        if key not in self._written:
            node.name = f"{self._scope}/{op}_{self._count}"
            self._count += 1
            node.output.extend([node.name, *(f"{node.name}:{index}" for index in range(1, outputs))])
            self.nodes.append(node)
            dtypes = (self._dtype(node, index, inputs, attributes) for index in range(outputs))
            self._written[key] = [Value(self, *each) for each in zip(node.output, dtypes, strict=True)]
        return self._written[key]

    def microsoft(self, op: str, *inputs: Value | None, **attributes: Any) -> Value:
        """Append a node of the domain com.microsoft with one output."""
        return self.node(op, *inputs, domain=MICROSOFT, **attributes)

    def concat(self, *values: Value, axis: int = 0) -> Value:
        """The concatenation of the values along an axis; constants are concatenated now and not at run time."""
        known = [self._arrays.get(each.name) for each in values]
        arrays = [each for each in known if each is not None]
        if len(arrays) == len(values):
            return self.constant(np.concatenate(arrays, axis))
        return super().concat(*values, axis=axis)

    def tensor(self, tensor: TensorProto) -> Value:
        """An initializer; equal tensors share one."""
        value = super().tensor(tensor)
        return Value(self, value.name, value.element_type, list(tensor.dims))

    def _write(self, tensor: TensorProto) -> Value:
        named = copied(tensor)
        named.name = self.free(f"{self._scope}/Constant_{self._count}")
        self._count += 1
        self.initializers.append(named)
        self._arrays[named.name] = numpy_helper.to_array(named)
        return Value(self, named.name, tensor.data_type, list(tensor.dims))

    def inner_prefix(self) -> str:
        """The prefix of the names inside the body of the next Scan or Loop."""
        return f"{self._scope}/scan_{self._count}_"

    def declare(self, value: Value, element_type: int, sizes: Sizes | None) -> Value:
        """The same value with its type and sizes, which are also written to the graph's value_info."""
        known = Value(self, value.name, element_type, sizes)
        self.infos[value.name] = helper.make_tensor_value_info(value.name, element_type, sizes)
        return known

    def rename(self, names: dict[str, str]) -> None:
        """Rename values wherever they are written, read or declared."""
        for node in self.nodes:
            rename(node, names)
        infos, self.infos = self.infos, {}
        for name, info in infos.items():
            info.name = names.get(name, name)
            self.infos[info.name] = info

    def keep(self, wanted: Collection[str]) -> None:
        """Drop the nodes, the optional results and the initializers that these values do not depend on."""
        self.nodes = needed(self.nodes, wanted)
        read = read_by(self.nodes).union(wanted)
        for node in self.nodes:
            leave_out_results(node, read)
        self.initializers = [each for each in self.initializers if each.name in read]
        self.infos = {name: info for name, info in self.infos.items() if name in read}
        self._written.clear()
        self._constants.clear()


KINDS: tuple[Any, ...] = ((int, float), str, (list, tuple))  # of attributes
ONE_AXIS_FROM = 13  # before this opset Softmax takes all axes from `axis` on together as one row


class NodeView:
    """A node whose inputs are values of a body.

    body: where nodes are written to.
    inputs: the node's inputs; None where an optional one is missing.
    attributes: as the node has them, text decoded.

    _problem: the exception for a node that lacks something, or has an attribute of a wrong kind.
    """

    _problem: ClassVar[type[Exception]] = ValueError
    body: Body
    inputs: Sequence[Value | None]
    attributes: Mapping[str, Any]

    def input(self, index: int) -> Value | None:
        """An optional input."""
        return self.inputs[index] if index < len(self.inputs) else None

    def required(self, index: int) -> Value:
        """An input that may not be missing."""
        value = self.input(index)
        if value is None:
            raise self._problem(f"it has no input {index}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or the operator's default; one of another kind than the default has no meaning."""
        value = self.attributes.get(name, default)
        kind = next((kind for kind in KINDS if isinstance(default, kind)), object)
        if not isinstance(value, kind):
            raise self._problem(
                f"its attribute {name} is of type {type(value).__name__}, expected one like {default!r}"
            )
        return value

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these attributes that the node has."""
        return {name: self.attributes[name] for name in names if name in self.attributes}

    def _sizes(self, index: int) -> Sizes | None:
        """The sizes of an input, None if the graph does not even tell the rank."""
        value = self.input(index)
        return None if value is None else value.sizes


def fused_product(node: NodeView) -> Value:
    """The result of FusedMatMul: alpha * a @ b, either of them transposed."""
    y = node.body.node("MatMul", _factor(node, 0, "A"), _factor(node, 1, "B"))
    alpha = node.get("alpha", 1.0)
    return y if alpha == 1 else y * alpha


def _factor(node: NodeView, index: int, side: str) -> Value:
    """An operand with its axes in the order of a product: its rows may come before the axes of the batch."""
    value, sizes = node.required(index), node._sizes(index)
    transposed, batch_transposed = node.get(f"trans{side}", 0), node.get(f"transBatch{side}", 0)
    if sizes is None:  # Einsum transposes without knowing the rank
        rows = "ji" if transposed else "ij"
        term = f"{rows[0]}...{rows[1]}" if batch_transposed else f"...{rows}"
        return value if term == "...ij" else value.apply("Einsum", equation=f"{term}->...ij")
    order = list(range(len(sizes)))
    if batch_transposed:
        order = [*order[1:-1], order[0], order[-1]]
    if transposed:
        order = [*order[:-2], order[-1], order[-2]]
    return value if order == sorted(order) else value.transpose(*order)


def biased_softmax(node: NodeView) -> Value:
    """The result of BiasSoftmax: softmax(x + bias), over the axes from `axis` on."""
    x, bias = node.required(0), node.required(1)
    axis, sizes = node.get("axis", 1), node._sizes(0)
    total = x + bias if _broadcasts(node, axis) else _plus_repeated(node, x, bias, axis)
    if node.body.opset < ONE_AXIS_FROM:
        return total.apply("Softmax", axis=axis)
    if sizes is not None and axis in (-1, len(sizes) - 1):
        return total.apply("Softmax", axis=-1)
    return total.flatten(axis).apply("Softmax", axis=1).reshape(x.shape())


def _broadcasts(node: NodeView, axis: int) -> bool:
    """Whether Add repeats the rows of a bias as BiasSoftmax does, as far as the graph tells; older opsets assume it."""
    sizes, own = node._sizes(0), node._sizes(1)
    if node.body.opset < ALLOW_ZERO_FROM:
        return True
    if sizes is None or own is None or len(own) > len(sizes):
        return False
    pairs = list(zip(sizes, [1] * (len(sizes) - len(own)) + [*own], strict=True))[: axis % len(sizes)]
    if node.get("is_inner_broadcast", 0):
        pairs.reverse()
    return all(size == one is not None for size, one in itertools.dropwhile(lambda pair: pair[1] == 1, pairs))


def _plus_repeated(node: NodeView, x: Value, bias: Value, axis: int) -> Value:
    """x + bias, of whose B rows the one for row r of R is r % B, or r // (R / B) for an inner broadcast."""
    body, one = x.body, x.body.ints([1])
    width, count = x.shape(axis).product(), x.flatten(axis).shape(0, 1)
    own = body.node("Max", bias.shape().product() / body.node("Max", width, one), one)
    sizes, of_bias = (count / own, own, width), (one, own, width)
    if node.get("is_inner_broadcast", 0):
        sizes, of_bias = (own, count / own, width), (own, one, width)
    return (x.in_shape(body.concat(*sizes)) + bias.in_shape(body.concat(*of_bias))).in_shape(x.shape())

"""Elements picked by index."""

from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import FLOATS
from opgrad.onnx.rules.node import Node, filled_like, ones_like
from opgrad.onnx.rules.registry import Gradients, NoGradient, gradient


@gradient("Gather", constant=(1,), integers=True)
def gather(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] += dy."""
    return node.microsoft("GatherGrad", node.x.shape(), node.required(1), node.dy, axis=node.get("axis", 0))


@gradient("GatherElements", constant=(1,), integers=True)
def gather_elements(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] += dy, element by element."""
    return node.microsoft("GatherElementsGrad", node.dy, node.x.shape(), node.required(1), axis=node.get("axis", 0))


@gradient("GatherND", constant=(1,), integers=True)
def gather_nd(node: Node) -> Value:
    """dx = 0; dx[index] += dy."""
    batch_dims = node.get("batch_dims", 0)
    return node.microsoft("GatherNDGrad", node.x.shape(), node.required(1), node.dy, batch_dims=batch_dims)


@gradient("TopK", constant=(1,), integers=True)
def top_k(node: Node) -> Value:
    """dx = 0; dx[.., index, ..] = dy, with the indices that the operator found."""
    indices = node.output(1, "_indices", TensorProto.INT64)
    return node.microsoft("GatherElementsGrad", node.dy, node.x.shape(), indices, axis=node.get("axis", -1))


@gradient("OneHot", constant=(0, 1))
def one_hot(node: Node) -> Gradients:
    """dvalues = the sums of dy where the index is not and where it is."""
    dtype = node.required(2).element_type
    mask = node.same(node.x, node.required(1), node.body.ints([0, 1]).cast(dtype or TensorProto.FLOAT))
    on = (node.dy * mask).sum(keepdims=False)
    off = node.dy.sum(keepdims=False) - on
    return [None, None, node.body.concat(off.reshape([1]), on.reshape([1]))]


# --- values that are written at indices ---


class _Places:
    """The places that a scatter writes to; other values can be read and written at the same places."""

    def __init__(self, node: Node):
        self._node = node
        self._tuples = node.proto.op_type == "ScatterND"
        self._axis = {} if self._tuples else {"axis": node.get("axis", 0)}

    def read(self, values: Value) -> Value:
        """The values at the places."""
        op = "GatherND" if self._tuples else "GatherElements"
        return self._node.body.node(op, values, self._node.required(1), **self._axis)

    def write(self, values: Value, updates: Value, reduction: str = "none") -> Value:
        """The values, with updates at the places."""
        op = "ScatterND" if self._tuples else "ScatterElements"
        mode = {} if reduction == "none" else {"reduction": reduction}
        return self._node.body.node(op, values, self._node.required(1), updates, **self._axis, **mode)


@gradient("Scatter", "ScatterElements", "ScatterND", constant=(1,), integers=True)
def scatter(node: Node) -> Gradients:
    """ddata = dy where nothing was written, or also there, if it was combined; dupdates = dy at the places."""
    if node.proto.op_type == "Scatter":
        node.become("ScatterElements", "", **node.attributes)
    reduction = node.get("reduction", "none")
    if reduction not in REDUCTIONS:
        raise NoGradient(f"its reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if reduction in ("add", "mul") and node.x.element_type not in (None, *FLOATS):
        raise NoGradient("it computes with integers of a quantized tensor, expected DequantizeLinear before it")
    if reduction not in ("none", "add"):
        node = node.wide()
    return REDUCTIONS[reduction](node, _Places(node))


def _replaced(node: Node, places: _Places) -> Gradients:
    zeros = filled_like(node.required(2), 0, node.dy)
    return [places.write(node.dy, zeros), None, places.read(node.dy)]


def _added(node: Node, places: _Places) -> Gradients:
    return [node.dy, None, places.read(node.dy)]


def _multiplied(node: Node, places: _Places) -> Gradients:
    """The product of all other factors, which is not y / update where an update is 0."""
    data, updates, dy = node.x, node.required(2), node.dy
    zero = updates.equals(0)
    zeros = places.read(places.write(filled_like(data, 0), zero.like(updates), "add"))
    factors = places.write(ones_like(data), updates, "mul")
    filled = node.where(zero, 1, updates)
    rest = places.read(places.write(data, filled, "mul"))
    others = node.where(zero, node.where(zeros.equals(1), rest, 0), node.where(zeros.equals(0), rest / filled, 0))
    return [dy * factors, None, places.read(dy) * others]


def _extreme(node: Node, places: _Places) -> Gradients:
    """dy, shared by what is equal to the result."""
    data, updates = node.x, node.required(2)
    kept = data.equals(node.y).like(node.dy)
    won = updates.equals(places.read(node.y)).like(node.dy)
    share = node.dy / places.write(kept, won, "add")
    return [share * kept, None, places.read(share) * won]


REDUCTIONS = {"none": _replaced, "add": _added, "mul": _multiplied, "max": _extreme, "min": _extreme}

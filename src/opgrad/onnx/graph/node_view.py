"""A node for the functions that write formulas for it: its inputs as values, and its attributes."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.sizes import Sizes

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


# --- operators of com.microsoft, written with those of ai.onnx ---


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
    total, axis, sizes = x + bias, node.get("axis", 1), node._sizes(0)
    if node.body.opset < ONE_AXIS_FROM:
        return total.apply("Softmax", axis=axis)
    if sizes is not None and axis in (-1, len(sizes) - 1):
        return total.apply("Softmax", axis=-1)
    return total.flatten(axis).apply("Softmax", axis=1).reshape(x.shape())

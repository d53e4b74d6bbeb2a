"""Finds out from an eval graph how the loss reduces the losses of a batch's rows: sum, mean, or weighted mean."""

from dataclasses import dataclass

import numpy as np
import onnx

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.training.files.objective import LOSSES

HANDING_ON = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Neg", "Sqrt")
TOGETHER = ("Add", "Sub", "Sum")


@dataclass(frozen=True)
class BatchReduction:
    """How a loss is reduced over rows, from which the loss of several batches together follows.

    sums: whether a batch's loss is a sum over its rows; else it is a mean.
    weights: the tensor with the class weights, if a mean is divided by the sum of the labels' weights.
    values: those weights, if they are constants of the graph.
    divisor: the tensor by which a sum is divided, if that is a sum over the rows, too.
    """

    sums: bool = False
    weights: str | None = None
    values: np.ndarray | None = None
    divisor: str | None = None


def find_reduction(model: onnx.ModelProto, loss: str) -> BatchReduction:
    """The reduction in an eval graph; a plain mean if it cannot be found out."""
    return _ReductionSearch(model).of(loss) or BatchReduction()


class _ReductionSearch:
    def __init__(self, model: onnx.ModelProto):
        self._forward, self._seen = Graph(model), set[str]()

    def of(self, name: str) -> BatchReduction | None:
        """The reduction by which a value was computed; None if it was not reduced."""
        node = self._forward.producers.get(name)
        if node is None or name in self._seen:
            return None
        self._seen.add(name)
        if node.op_type in LOSSES:
            return self._of_classes(node)
        if domain_of(node):
            return None
        if node.op_type in ("ReduceSum", "ReduceMean"):
            return self._of_rows(node)
        if node.op_type in HANDING_ON:
            return self.of(node.input[0])
        if node.op_type == "Div":
            return self._divided(node)
        if node.op_type in ("Mul", "Max", *TOGETHER):
            found = [self.of(each) for each in node.input if self._forward.constant(each) is None]
            return next((each for each in found if each is not None), None)
        return None

    def _of_classes(self, node: onnx.NodeProto) -> BatchReduction | None:
        reduction = attributes_of(node).get("reduction", "mean")
        if reduction == "none":
            return None
        weights = node.input[2] if len(node.input) > 2 else ""
        if reduction == "sum" or not weights:
            return BatchReduction(sums=reduction == "sum")
        return BatchReduction(weights=weights, values=self._forward.constant(weights))

    def _of_rows(self, node: onnx.NodeProto) -> BatchReduction | None:
        """The reduction of a node that reduces axes: its own if it reduces the first axis, else that of its input."""
        before = self._forward.sizes(node.input[0])
        given = [each.ints for each in node.attribute if each.name == "axes"]
        axes = list(given[0]) if given else None
        if len(node.input) > 1 and node.input[1]:
            known = self._forward.constant(node.input[1])
            axes = None if known is None else known.tolist()
        if axes and 0 not in axes and not (before is not None and -len(before) in axes):
            return self.of(node.input[0])
        return BatchReduction(sums=True) if node.op_type == "ReduceSum" else self.of(node.input[0]) or BatchReduction()

    def _divided(self, node: onnx.NodeProto) -> BatchReduction | None:
        found, divisor = self.of(node.input[0]), node.input[1]
        if found is None or not found.sums or self._forward.constant(divisor) is not None:
            return found
        by = self.of(divisor)
        return BatchReduction(divisor=divisor) if by is not None and by.sums else BatchReduction()

"""Fusions of nodes of a training graph into fewer or faster ones, before onnxruntime loads the graph."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of
from opgrad.onnx.graph.sizes import are_equal
from opgrad.onnx.passes.losses import LOSS, LOSS_AND_GRADIENT, LOSS_GRADIENT, fuse_with_gradient

# The ratio with which DropoutGrad sets to 0 what the mask leaves out and keeps the rest as it is: its factor
# 1 / (1 - ratio) is rounded to 1. With a ratio of 0 it would ignore the mask.
TINY_RATIO = 2.0**-60


@dataclass(frozen=True)
class Fused:
    """A fusion: the operators that were replaced, and the operator in their place."""

    operators: tuple[str, ...]
    by: str


def fuse(model: onnx.ModelProto) -> list[Fused]:
    """Apply all fusions to a training graph, in place; returns those that were applied, in the order of the graph.

    * SoftmaxCrossEntropyLoss and its gradient become one node, which reads the logits once, if only that gradient reads
    the log-probabilities, and the gradient of the loss itself is 1.
    * Where with a float32 array, a mask of its shape and 0, as in the gradient of Clip, becomes DropoutGrad, which
      takes a tenth of the time of onnxruntime's Where.
    """
    if not any(node.op_type in PASSES for node in model.graph.node):
        return []
    graph = Graph(copied(model), overridable(model))
    found = list(_replaced(graph))
    if found:
        graph.commit()
        model.CopyFrom(graph.model)
    return found


def _replaced(graph: Graph) -> Iterator[Fused]:
    for node in list(graph.nodes()):
        replace = PASSES.get(node.op_type)
        done = replace(graph, node) if replace is not None and not domain_of(node) else None
        if done is not None:
            yield done


def _fuse_loss(graph: Graph, node: onnx.NodeProto) -> Fused | None:
    return Fused((LOSS, LOSS_GRADIENT), LOSS_AND_GRADIENT) if fuse_with_gradient(graph, node) else None


def _select(graph: Graph, node: onnx.NodeProto) -> Fused | None:
    mask, values, other = node.input
    alike = graph.sizes(values) and are_equal(graph.sizes(mask), graph.sizes(values))
    if not alike or graph.element_type(values) != TensorProto.FLOAT or graph.scalar(other) != 0.0:
        return None
    ratio = graph.add_constant(np.array(TINY_RATIO, np.float32), f"{node.output[0]}/ratio")
    graph.substitute(node, [graph.node("DropoutGrad", [values, mask, ratio], list(node.output), MICROSOFT)])
    return Fused(("Where",), "DropoutGrad")


PASSES: dict[str, Callable[[Graph, onnx.NodeProto], Fused | None]] = {LOSS: _fuse_loss, "Where": _select}

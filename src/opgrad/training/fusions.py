"""Groups of nodes of a training graph that become one node each, before onnxruntime gets the graph."""

from collections.abc import Callable
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from opgrad.gradients.passes.graph import Graph
from opgrad.onnxruntime.messages import MICROSOFT, copied, domain_of

# By the activation: its gradient, and both with the bias inside.
BIASED = {
    "Gelu": ("GeluGrad", "BiasGelu", "BiasGeluGrad_dX"),
    "FastGelu": ("FastGeluGrad", "FastGelu", "BiasFastGeluGrad_dX"),
}


@dataclass(frozen=True)
class Fused:
    """What was replaced: the operators of a group, those in their place, and the value that is no longer stored."""

    operators: tuple[str, ...]
    by: tuple[str, ...]
    value: str


def fuse_bias_gelu(model: onnx.ModelProto) -> list[Fused]:
    """Let Gelu or FastGelu and their gradients add the bias themselves, without a node for the sum.

    Behind products it ran at 0.86 to 1.22 of the plain graph's speed with Gelu, at 0.63 to 1.06 with FastGelu.

    model: changed in place. Only float32 sums with a vector along the last axis, which nothing but the activation and
        its gradient reads, and which are no outputs of the graph.
    Returns what was replaced, in the order of the graph.
    """
    gradients = {gradient for gradient, _, _ in BIASED.values()}
    if not any(node.op_type in gradients and domain_of(node) == MICROSOFT for node in model.graph.node):
        return []
    graph = Graph(copied(model))
    found = [each for node in list(graph.nodes()) if (each := _fuse(graph, node)) is not None]
    if found:
        graph.commit()
        model.CopyFrom(graph.model)
    return found


PASSES: tuple[Callable[[onnx.ModelProto], list[Fused]], ...] = (fuse_bias_gelu,)


def fuse(model: onnx.ModelProto) -> list[Fused]:
    """Run all passes over a training graph, in place. Returns what was replaced."""
    return [each for run in PASSES for each in run(model)]


def _fuse(graph: Graph, activation: onnx.NodeProto) -> Fused | None:
    """Fuse an activation, its gradient and the sum that both read; None if they are not that."""
    if domain_of(activation) != MICROSOFT or activation.op_type not in BIASED or len(activation.input) != 1:
        return None
    backward, fused, fused_backward = BIASED[activation.op_type]
    total = activation.input[0]
    add = graph.maker(total, "Add")
    terms = _terms(graph, add) if add is not None else None
    gradient = _gradient(graph, total, activation, backward)
    if add is None or terms is None or gradient is None:
        return None
    names = ("Add", activation.op_type, backward)
    forward = graph.node(fused, terms, list(activation.output), MICROSOFT)
    graph.substitute(activation, [forward])
    behind = graph.node(fused_backward, [gradient.input[0], *terms], list(gradient.output), MICROSOFT)
    graph.substitute(gradient, [behind])
    graph.substitute(add, [])
    return Fused(names, (fused, fused_backward), total)


def _terms(graph: Graph, add: onnx.NodeProto) -> tuple[str, str] | None:
    """(x, bias) of a float32 sum, if the bias is a vector as long as the last axis of x."""
    for x, bias in (tuple(add.input), tuple(add.input)[::-1]):
        sizes, length = graph.sizes(x), graph.known(bias)
        fits = sizes is not None and len(sizes) > 1 and length is not None and length == [sizes[-1]]
        if fits and graph.element_type(x) == TensorProto.FLOAT:
            return x, bias
    return None


def _gradient(graph: Graph, total: str, activation: onnx.NodeProto, op_type: str) -> onnx.NodeProto | None:
    """The gradient's node, if it and the activation are all that reads the sum."""
    if not graph.inner(total, readers=2):
        return None
    (other,) = (each for each in graph.readers[total] if each is not activation)
    fits = other.op_type == op_type and domain_of(other) == MICROSOFT
    return other if fits and len(other.input) == 2 and other.input[1] == total != other.input[0] else None

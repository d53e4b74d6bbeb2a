"""Means of losses over the labels that count, which are 0 where none does."""

from collections.abc import Collection
from typing import Any

import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import comparable, copied, domain_of, free_name, keep
from opgrad.onnx.graph.nodes import attributes_of

LOSSES = _, OF_LOG_PROBABILITIES = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"


def least_divisor(kind: int) -> float:
    """The number by which a sum of this type is divided at least, which no sum of weights above 0 is below."""
    return 2.0**-24 if kind == TensorProto.FLOAT16 else 2.0**-126


def guard_means(forward: Graph, operators: Collection[str] = LOSSES) -> None:
    """Write the means of these losses, of which a label may not count, as sums and divisors above 0, in place.

    onnxruntime divides by the number of the labels that count, or by the sum of their weights: 0 / 0 is NaN.
    """
    for node in list(forward.nodes()):
        if node.op_type in operators and _is_mean_of_some(forward, node):
            kinds = [kind for name in (node.input[1], node.output[0]) if (kind := forward.element_type(name))]
            if len(kinds) == 2:
                forward.substitute(node, _guarded(forward, node, *kinds))
    forward.refresh()


def _is_mean_of_some(forward: Graph, node: onnx.NodeProto) -> bool:
    """Whether a loss is a mean of which a label may not count: a class is ignored, or has a weight that may be 0."""
    given, (weight,) = attributes_of(node), [*node.input[2:3], ""][:1]
    if domain_of(node) or given.get("reduction", "mean") != "mean":
        return False
    known = forward.constant(weight) if weight else None
    return "ignore_index" in given or (weight != "" and (known is None or (known.min(initial=1) == 0)))


def _guarded(forward: Graph, node: onnx.NodeProto, of_labels: int, of_loss: int) -> list[onnx.NodeProto]:
    """The sum of a loss, divided by the sum of the weights of the labels that count."""
    labels, weights, loss, made = node.input[1], "".join(node.input[2:3]), node.output[0], list[onnx.NodeProto]()

    def constant(what: str, value: float, kind: int) -> str:
        name = free_name(f"{loss}.{what}", forward.taken)
        forward.graph.initializer.append(helper.make_tensor(name, kind, (), [value]))
        return name

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        name = free_name(f"{loss}.{op}", forward.taken)
        made.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    counts, ignored = "", attributes_of(node).get("ignore_index")
    if ignored is None:
        counts = add("Gather", weights, labels)
    else:
        kind = comparable(of_labels, ignored)
        compared = labels if kind == of_labels else add("Cast", labels, to=kind)
        counted = add("Not", add("Equal", compared, constant("ignored", ignored, kind)))
        counts = add("Cast", counted, to=of_loss)
        if weights:
            known = add("Mul", labels, add("Cast", counted, to=of_labels))
            counts = add("Mul", add("Gather", weights, known), counts)
    divisor = add("Max", add("ReduceSum", counts, keepdims=0), constant("least", least_divisor(of_loss), of_loss))
    summed = copied(node)
    summed.output[0] = free_name(f"{loss}.sum", forward.taken)
    keep(summed.attribute, [each for each in node.attribute if each.name != "reduction"])
    summed.attribute.append(helper.make_attribute("reduction", "sum"))
    mean = helper.make_node("Div", [summed.output[0], divisor], [loss], free_name(f"{loss}.mean", forward.taken))
    return [*made, summed, mean]

"""The normal form of a model that is trained, and its form for evaluation."""

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph import conversion
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of, free_name, import_microsoft, keep, opset_of
from opgrad.onnx.graph.nodes import all_nodes, attributes_of, model_nodes
from opgrad.onnx.graph.subgraphs import hoist_constants
from opgrad.onnx.rules.node import RULES
from opgrad.training.make.outputs import correct_shapes

LEAST_OPSET = 12  # the first with SoftmaxCrossEntropyLoss
LEAST_IR_VERSION = 4  # before this version every initializer has to be an input, too
RESULTS = ("running_mean", "running_var", "saved_mean", "saved_inv_std")


def normalize(model: onnx.ModelProto) -> None:
    """Bring a model into the form for training, in place.

    Opset 12 at least, correct declared shapes, no inputs with defaults, no weights in functions, unique names.
    """
    if opset_of(model) < LEAST_OPSET:
        conversion.raise_opset(model, LEAST_OPSET)
    hoist_constants(model, RULES)
    model.ir_version = max(model.ir_version, LEAST_IR_VERSION)
    held = {each.name for each in model.graph.initializer}
    keep(model.graph.input, [each for each in model.graph.input if each.name not in held])
    correct_shapes(model)
    taken: set[str] = set()
    for node in all_nodes(model.graph.node):
        if node.name:
            node.name = free_name(node.name, taken)


# --- batch normalization and dropout ---------------------------------------------------------------------------------


def statistics(model: onnx.ModelProto, training: bool = False) -> list[str]:
    """The names of the means and variances of all batch normalizations, or only of those in training mode."""
    nodes = [node for node in conversion.batch_norms(model) if not training or conversion.trains(node, opset_of(model))]
    return list(
        dict.fromkeys(node.input[index] for node in nodes for index in conversion.STATISTICS if index < len(node.input))
    )


def train(model: onnx.ModelProto) -> None:
    """Set all batch normalizations to training mode, in which they use the statistics of the batch."""
    if opset_of(model) < conversion.TRAINING_MODE_FROM and any(conversion.batch_norms(model)):
        conversion.raise_opset(model, conversion.TRAINING_MODE_FROM)
    for node in conversion.batch_norms(model):
        conversion.set_training_mode(node, 1, opset_of(model))


def evaluated(model: onnx.ModelProto, known: Graph) -> onnx.ModelProto:
    """A copy of a model for evaluation: without dropout, and with batch normalization by its running statistics.

    known: a graph with the types of values.
    """
    copy = copied(model)
    import_microsoft(copy)  # onnxruntime needs it for nodes that it fuses when opgrad's operators are registered
    for node in model_nodes(copy):
        if node.op_type == "Dropout" and not domain_of(node) and len(node.input) > 2:
            node.input[2] = ""
        elif node.op_type == "DropoutTraining" and domain_of(node) == MICROSOFT:
            copies = helper.make_node("Identity", node.input[:1], node.output[:1], node.name)
            node.CopyFrom(copies)
    conversion.evaluating(copy)
    guard_means(Graph(copy, known=known))
    return copy


def with_running_statistics(model: onnx.ModelProto) -> None:
    """Let batch normalizations in training mode update their running statistics in the memory of the inputs."""
    taken = {name for node in all_nodes(model.graph.node) for name in node.output}
    for node in list(conversion.batch_norms(model)):
        if conversion.trains(node, opset_of(model)):
            given = {each.name: each.f for each in node.attribute if each.name in ("epsilon", "momentum")}
            names = [*node.output[1:3], *[""] * (3 - len(node.output))]
            results = [
                name or free_name(f"{node.output[0]}_{kind}", taken) for name, kind in zip(names, RESULTS, strict=False)
            ]
            results += [free_name(f"{node.output[0]}_{kind}", taken) for kind in RESULTS[2:]]
            del node.output[1:], node.attribute[:]
            node.output.extend(results)
            node.op_type, node.domain = "BatchNormInternal", MICROSOFT
            settings = {"epsilon": 1e-5, "momentum": 0.9, "training_mode": 1} | given
            node.attribute.extend(helper.make_attribute(name, value) for name, value in settings.items())
            import_microsoft(model)


# --- means of no label ------------------------------------------------------------------------------------------------


LOSSES = _, OF_LOG_PROBABILITIES = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"


def least_divisor(dtype: int) -> float:
    """The number by which a sum of this type is divided at least, which no sum of weights above 0 is below."""
    return 2.0**-24 if dtype == TensorProto.FLOAT16 else 2.0**-126


def weights_of(labels: Value, weights: Value | None, ignored: int | None, dtype: int) -> Value | None:
    """The weight of each label in a mean, 0 of one that is ignored; None if all weights are 1.

    weights: of the classes. dtype: the type of the result.
    """
    body = labels.body
    if ignored is None:
        return None if weights is None else body.node("Gather", weights, labels)
    counted = ~labels.is_label(ignored)
    if weights is None:
        return counted.cast(dtype)
    known = labels * counted.cast(labels.element_type or TensorProto.INT64)
    return body.node("Gather", weights, known) * counted.cast(dtype)


def guard_means(forward: Graph, operators: Collection[str] = LOSSES) -> None:
    """Write the means of these losses, of which a label may not count, as sums and divisors above 0, in place.

    onnxruntime divides by the number of the labels that count, or by the sum of their weights: 0 / 0 is NaN.
    """
    for node in list(forward.nodes()):
        given = attributes_of(node) if node.op_type in operators and not domain_of(node) else {"reduction": "none"}
        if given.get("reduction", "mean") != "mean":
            continue
        weight = [*node.input[2:3], ""][0]
        known = forward.constant(weight) if weight else None
        if "ignore_index" in given or (weight and (known is None or known.min(initial=1) == 0)):
            kinds = [dtype for name in (node.input[1], node.output[0]) if (dtype := forward.element_type(name))]
            if len(kinds) == 2:
                forward.substitute(node, _guarded(forward, node, *kinds))
    forward.refresh()


def _guarded(forward: Graph, node: onnx.NodeProto, of_labels: int, of_loss: int) -> list[onnx.NodeProto]:
    """The sum of a loss, divided by the sum of the weights of the labels that count."""
    loss, body = node.output[0], GraphBody(forward.opset, forward.taken)
    body.scope(f"{loss}.mean")
    labels, ignored = Value(body, node.input[1], of_labels), attributes_of(node).get("ignore_index")
    weights = Value(body, node.input[2], of_loss) if any(node.input[2:3]) else None
    counts = weights_of(labels, weights, ignored, of_loss)
    assert counts is not None
    least = body.number(least_divisor(of_loss), counts)
    divisor = body.node("Max", counts.sum(keepdims=False), least)
    forward.graph.initializer.extend(body.initializers)
    summed = copied(node)
    summed.output[0] = body.free(f"{loss}.sum")
    keep(summed.attribute, [each for each in node.attribute if each.name != "reduction"])
    summed.attribute.append(helper.make_attribute("reduction", "sum"))
    mean = helper.make_node("Div", [summed.output[0], divisor.name], [loss], body.free(f"{loss}/Div"))
    return [*body.nodes, summed, mean]

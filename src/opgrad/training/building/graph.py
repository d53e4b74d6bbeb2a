"""The training graph: gradients of the loss behind a model, added to buffers of the caller's."""

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from opgrad.gradients.backward import SUFFIX
from opgrad.gradients.body import GraphBody
from opgrad.gradients.forward import FLOATS, Forward
from opgrad.gradients.model import LEAST_OPSET, append, differentiate, prepared
from opgrad.onnxruntime.bodies.build import Value
from opgrad.onnxruntime.bodies.forms import MICROSOFT
from opgrad.training.building.checks import listed
from opgrad.training.building.forms import with_running_statistics
from opgrad.training.names import BUFFER_SUFFIX, RESET, RESULT_SUFFIX


def training_graph(model: onnx.ModelProto, loss: str, wanted: Sequence[str]) -> onnx.ModelProto:
    """The model with the gradients of a loss: what is added to their buffers in each run.

    model: changed. loss: one number. wanted: inputs of the graph.

    Behind its outputs the graph has `<name>_grad.accumulation.out`, bool [1], for each of `wanted`; behind its inputs
    `<name>_grad.accumulation.buffer`, to which the gradient is added, or which becomes it where `lazy_reset_grad`,
    bool [1], is true.

    Raises ValueError where the loss is no number or does not depend on one of them, NotImplementedError for nodes that
    have no gradient.
    """
    with_running_statistics(model)
    forward = prepared(optimized(model, loss, wanted), [loss], wanted, LEAST_OPSET)
    body = GraphBody(forward.opset, forward.names())
    found = differentiate(forward, body, {loss: _seed(forward, body, loss)}, wanted)
    gradients = {name: _named(body, name, found[name]) for name in wanted}
    append(forward, body, _accumulators(forward, body, gradients))
    return forward.model


def optimized(model: onnx.ModelProto, loss: str, wanted: Sequence[str]) -> onnx.ModelProto:
    """The model with a faster forward graph: here passes over the graph take their place."""
    return model


def _seed(forward: Forward, body: GraphBody, loss: str) -> Value:
    """The gradient of the loss with respect to itself, an initializer: 1 in the loss's type and shape."""
    kind, sizes = forward.element_type(loss) or TensorProto.FLOAT, forward.sizes(loss)
    if kind not in FLOATS:
        raise ValueError(f"the loss {loss!r} has elements of type {TensorProto.DataType.Name(kind)}, expected floats")
    if sizes is None:
        body.scope(loss + SUFFIX)
        value = Value(body, loss, kind, None)
        return body.declare(body.number(1, value).expand(value.shape()), kind, None)
    if any(size != 1 for size in sizes):
        shape = ", ".join("?" if size is None else str(size) for size in sizes)
        raise ValueError(
            f"the loss {loss!r} has shape ({shape}), expected one number: a loss of the model's outputs, or a block "
            "such as ReduceMean that reduces it"
        )
    name = body.free(loss + SUFFIX)
    body.initializers.append(helper.make_tensor(name, kind, [1] * len(sizes), [1.0]))
    return Value(body, name, kind, sizes)


def _named(body: GraphBody, name: str, gradient: Value) -> str:
    """The name of a gradient, which is that of the value with `_grad` behind it."""
    wanted = name + SUFFIX
    if gradient.name != wanted:
        body.nodes.append(helper.make_node("Identity", [gradient.name], [wanted], f"{wanted}/Identity"))
    return wanted


def _accumulators(forward: Forward, body: GraphBody, gradients: dict[str, str]) -> list[onnx.ValueInfoProto]:
    """Nodes that add gradients to their buffers, which become inputs of the graph; returns the new outputs."""
    graph, outputs = forward.graph, []
    _check_free(forward, gradients)
    for index, (name, gradient) in enumerate(gradients.items(), len(graph.output)):
        kind = forward.element_type(name) or TensorProto.FLOAT
        buffer, result = name + BUFFER_SUFFIX, name + RESULT_SUFFIX
        graph.input.append(helper.make_tensor_value_info(buffer, kind, forward.sizes(name)))
        node = helper.make_node(
            "InPlaceAccumulatorV2", [buffer, gradient, RESET], [result], f"GradientAccumulator{index}", domain=MICROSOFT
        )
        body.nodes.append(node)
        body.declare(Value(body, gradient, kind), kind, forward.sizes(name))
        outputs.append(helper.make_tensor_value_info(result, TensorProto.BOOL, [1]))
    graph.input.append(helper.make_tensor_value_info(RESET, TensorProto.BOOL, [1]))
    return outputs


def _check_free(forward: Forward, gradients: dict[str, str]) -> None:
    """Raise ValueError if the graph has names already that training adds."""
    new = {RESET, *(name + suffix for name in gradients for suffix in (BUFFER_SUFFIX, RESULT_SUFFIX, SUFFIX))}
    taken = sorted(new & forward.names())
    if taken:
        raise ValueError(
            f"the model has {listed(taken)} already: expected a model without gradients, no training graph"
        )

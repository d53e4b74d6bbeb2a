"""The training graph: a model with the gradients of its loss."""

from collections.abc import Collection, Sequence

import onnx
from onnx import TensorProto, helper

from opgrad.onnx import passes
from opgrad.onnx.gradients.backward import SUFFIX
from opgrad.onnx.gradients.differentiation import Differentiated, append, differentiate, prepared
from opgrad.onnx.gradients.expansion import inline_functions
from opgrad.onnx.graph.body import GraphBody
from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.messages import FLOATS, copied, keep
from opgrad.training.files.accumulators import BUFFER_SUFFIX, RESET, RESULT_SUFFIX
from opgrad.training.make.checks import listed
from opgrad.training.make.forms import OF_LOG_PROBABILITIES, guard_means, with_running_statistics
from opgrad.training.make.outputs import inputs_as_constants


def training_graph(
    model: onnx.ModelProto,
    loss: str,
    wanted: Sequence[str],
    constants: Sequence[TensorProto] = (),
    ends: Sequence[str] = (),
    known: Graph | None = None,
) -> Differentiated:
    """The model with the gradients of a loss, `<name>_grad` for each of `wanted`, behind its outputs.

    model: changed. loss: one number. wanted: inputs of the graph. constants: the values of other inputs, on which
        shapes depend. ends: values with whose nodes segments may end. known: a graph with the types of values.

    Raises ValueError where the loss is no number or does not depend on one of them, NotImplementedError for nodes that
    have no gradient.
    """
    with_running_statistics(model)
    inputs = [copied(each) for each in model.graph.input]
    inputs_as_constants(model.graph, constants)
    model, variable = inline_functions(model), overridable(model)
    simple = Graph(model, variable, [loss, *ends], known=known)
    passes.simplify(simple)
    simple = simple.again()
    guard_means(simple, [OF_LOG_PROBABILITIES])  # others become nodes of opgrad, whose means are 0
    forward = prepared(simple, [loss], wanted)
    outputs = tuple(each.name for each in forward.graph.output)
    body = GraphBody(forward.opset, forward.names())
    seed = _seed(forward, body, loss)
    found = differentiate(forward, body, {loss: seed}, wanted)
    taken = forward.names()
    gradients = [_gradient(forward, body, name, found[name], taken) for name in wanted]
    append(forward, body, gradients)
    graph = forward.again(variable, {seed.name, *outputs, *ends})
    passes.tidy(graph)
    _restore_inputs(graph, inputs)
    names = {name: each.name for name, each in zip(wanted, gradients, strict=True)}
    return Differentiated(graph.again(variable, graph.kept), outputs, names)


def _restore_inputs(graph: Graph, inputs: Sequence[onnx.ValueInfoProto]) -> None:
    """Undo `inputs_as_constants`: give the graph these inputs again, and remove the initializers of these names."""
    names, message = {each.name for each in inputs}, graph.graph
    keep(message.initializer, [each for each in message.initializer if each.name not in names])
    del message.input[:]
    message.input.extend(inputs)


def _seed(forward: Graph, body: GraphBody, loss: str) -> Value:
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


def _gradient(
    forward: Graph, body: GraphBody, name: str, gradient: Value, taken: Collection[str]
) -> onnx.ValueInfoProto:
    """The output with a gradient, whose name is that of the value with `_grad` behind it. taken: the graph's names."""
    wanted = name + SUFFIX
    new = {RESET, wanted, *(name + suffix for suffix in (BUFFER_SUFFIX, RESULT_SUFFIX))}
    if both := new.intersection(taken):
        raise ValueError(
            f"the model has {listed(sorted(both))} already: expected a model without gradients, no training graph"
        )
    if gradient.name != wanted:
        body.nodes.append(helper.make_node("Identity", [gradient.name], [wanted], f"{wanted}/Identity"))
    kind = forward.element_type(name) or TensorProto.FLOAT
    return helper.make_tensor_value_info(wanted, kind, forward.sizes(name))

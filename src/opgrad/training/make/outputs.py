"""The outputs of a model, and the types of its values."""

from collections.abc import Collection, Sequence

import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import CLASSICAL, copied, domain_of, keep
from opgrad.onnx.graph.nodes import read_by
from opgrad.training.make.checks import near


def declare_types(model: onnx.ModelProto, known: Graph | None = None) -> Graph:
    """Declare the types and shapes of all values that a graph's nodes compute, as far as they can be inferred."""
    forward, graph = Graph(model, known=known), model.graph
    declared = {each.name for each in (*graph.input, *graph.output)}
    before = {each.name: each for each in graph.value_info}
    made = dict.fromkeys(name for node in graph.node for name in node.output if name and name not in declared)
    found = [value_info(forward, name) or before.get(name) for name in made]
    keep(graph.value_info, [each for each in found if each is not None])
    return forward


def correct_shapes(model: onnx.ModelProto) -> None:
    """Replace declared shapes of outputs and other values that contradict the inferred ones by these."""
    bare, graph = copied(model), model.graph
    del bare.graph.value_info[:]
    for output in bare.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    found = Graph(bare)
    symbols = {size.dim_param for each in graph.input for size in each.type.tensor_type.shape.dim} - {""}
    for value in (*graph.output, *graph.value_info):
        tensor, sizes = value.type.tensor_type, found.sizes(value.name)
        if sizes is None or not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
            continue
        declared = [size.dim_value if size.HasField("dim_value") else None for size in tensor.shape.dim]
        known = [size if isinstance(size, int) or size in symbols else None for size in sizes]
        pairs = zip(declared, known, strict=False)
        if len(declared) != len(sizes) or any(None not in each and each[0] != each[1] for each in pairs):
            value.CopyFrom(helper.make_tensor_value_info(value.name, tensor.elem_type, known))


def value_info(forward: Graph, name: str) -> onnx.ValueInfoProto | None:
    """The type and shape of a value, as far as they are known; None if its type is not."""
    dtype = forward.element_type(name)
    return helper.make_tensor_value_info(name, dtype, forward.sizes(name)) if dtype else None


def set_outputs(forward: Graph, names: Sequence[str]) -> None:
    """Replace the outputs of a graph by these. Raises LookupError for a name that has no value or an unknown type."""
    graph = forward.graph
    before = {each.name: each for each in graph.output}
    found = [_output(forward, before, name) for name in dict.fromkeys(names)]
    keep(graph.output, found)
    keep(graph.value_info, [each for each in graph.value_info if each.name not in set(names)])


def _output(forward: Graph, before: dict[str, onnx.ValueInfoProto], name: str) -> onnx.ValueInfoProto:
    graph = forward.graph
    values = {*forward.producers, *(each.name for each in graph.input), *forward.initializers}
    if name not in values and name not in before:
        raise LookupError(f"the graph has no value {name!r} to be an output{near(name, values)}")
    found = value_info(forward, name) or before.get(name)
    if found is None:
        raise LookupError(f"nothing tells the type of {name!r}, expected it in the graph's value_info")
    return found


def cut_maps(model: onnx.ModelProto) -> dict[str, str]:
    """Cut off nodes that make maps of scores for outputs, in place; what they read becomes the output.

    The result: the tensors in the places of these outputs, by the outputs' names.
    """
    graph, read = model.graph, read_by(model.graph.node)
    cut = {
        node.output[0]: node.input[0]
        for node in graph.node
        if (domain_of(node), node.op_type) == (CLASSICAL, "ZipMap") and node.output[0] not in read
    }
    if cut:
        forward, outputs = Graph(model), {cut.get(each.name, each.name): each for each in graph.output}
        tensors = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in cut.values()}
        keep(graph.node, [node for node in graph.node if node.output[0] not in cut])
        keep(graph.output, [value_info(forward, name) or tensors.get(name) or outputs[name] for name in outputs])
        keep(graph.value_info, [each for each in graph.value_info if each.name not in outputs])
    return cut


def cut_note(output: str, tensor: str) -> str:
    return f"ZipMap, which makes maps for the output {output!r}, is cut off; {tensor!r} is the output that is trained"


def inputs_as_constants(graph: onnx.GraphProto, tensors: Collection[onnx.TensorProto]) -> None:
    """Turn the inputs of these names into initializers with these values."""
    names = {each.name for each in tensors}
    keep(graph.input, [each for each in graph.input if each.name not in names])
    graph.initializer.extend(tensors)

"""The trained model as an ordinary ONNX inference model."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

from opgrad.training.artifact_set import ArtifactSet
from opgrad.writing import replaced

if TYPE_CHECKING:
    from onnxruntime import NodeArg

ELEMENT_TYPES = {
    "tensor(float)": onnx.TensorProto.FLOAT,
    "tensor(double)": onnx.TensorProto.DOUBLE,
    "tensor(float16)": onnx.TensorProto.FLOAT16,
    "tensor(bfloat16)": onnx.TensorProto.BFLOAT16,
}
# What a protobuf message may have, less some room for the graph around the parameters.
LARGEST = (1 << 31) - (1 << 24)


def export_model(
    artifacts: ArtifactSet,
    parameters: Mapping[str, np.ndarray],
    score_type: "NodeArg",
    path: str | PathLike[str],
) -> None:
    """Write the eval graph without its loss, with the parameters in it.

    artifacts: whose eval graph it is.
    parameters: the values of all parameters by name.
    score_type: name, type and shape of the scores, which become the output.
    path: the file; a crash on the way leaves an older file as it was.
    """
    output = helper.make_tensor_value_info(score_type.name, ELEMENT_TYPES[score_type.type], list(score_type.shape))
    _write(artifacts.eval_model, artifacts.name, parameters, [output], path)


def write_inference_model(
    source: onnx.ModelProto,
    parameters: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    path: str | PathLike[str],
    who: str,
) -> None:
    """Write a graph up to some of its tensors, with the parameters in it.

    source: the model whose inputs the parameters are.
    parameters: the values of all parameters by name.
    outputs: the tensors that become the outputs.
    path: the file; a crash on the way leaves an older file as it was.
    who: the caller, for messages.
    Raises ValueError if there are no outputs, or one is no tensor that a node of the graph computes.
    """
    graph = source.graph
    computed = [name for node in graph.node for name in node.output if name]
    wrong = [name for name in outputs if name not in computed]
    if wrong or not outputs:
        found = ", ".join(map(repr, wrong)) or "no names"
        known = ", ".join(computed[-8:])
        raise ValueError(f"{who}: graph_output_names has {found}, expected tensors of the eval graph such as {known}")
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"{who}: there is no folder {Path(path).absolute().parent}")
    typed = {value.name: value for value in (*graph.value_info, *graph.output)}
    if any(name not in typed for name in outputs):
        inferred = onnx.shape_inference.infer_shapes(source).graph
        typed |= {value.name: value for value in (*inferred.value_info, *inferred.output)}
    values = [typed.get(name) or onnx.ValueInfoProto(name=name) for name in outputs]
    _write(source, graph.name or "inference", parameters, values, path)


def _write(
    source: onnx.ModelProto,
    name: str,
    parameters: Mapping[str, np.ndarray],
    outputs: Sequence[onnx.ValueInfoProto],
    path: str | PathLike[str],
) -> None:
    nodes = nodes_before(source.graph, [output.name for output in outputs])
    read = {name for node in nodes for name in _read_by(node)}
    inputs = [value for value in source.graph.input if value.name in read and value.name not in parameters]
    constants = [tensor for tensor in source.graph.initializer if tensor.name in read]
    trained = [numpy_helper.from_array(array, name) for name, array in parameters.items() if name in read]
    model = helper.make_model(
        helper.make_graph(nodes, name, inputs, outputs, constants + trained),
        producer_name="opgrad",
        ir_version=source.ir_version,
        opset_imports=source.opset_import,
        functions=source.functions,
    )
    _save(model, Path(path))


def _save(model: onnx.ModelProto, path: Path) -> None:
    """Check the model and put it in the file's place; beyond 2 GiB the parameters go into a file beside it."""
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    with replaced(path) as partial:
        if size > LARGEST:
            beside = Path(f"{path.name}.data")
            (path.parent / beside).unlink(missing_ok=True)
            onnx.save(model, partial, save_as_external_data=True, location=beside.name)
            onnx.checker.check_model(partial)
        else:
            onnx.checker.check_model(model)
            onnx.save(model, partial)


def nodes_before(graph: onnx.GraphProto, tensors: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes that some tensors depend on, in the graph's order."""
    needed, nodes = set(tensors), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(_read_by(node))
            nodes.append(node)
    return nodes[::-1]


def _read_by(node: onnx.NodeProto) -> set[str]:
    """The tensors that a node reads, its subgraphs included."""
    names = {name for name in node.input if name}
    for item in node.attribute:
        for graph in (item.g, *item.graphs):
            own = {name for inner in graph.node for name in inner.output} | {value.name for value in graph.input}
            own |= {tensor.name for tensor in graph.initializer}
            inside = {name for inner in graph.node for name in _read_by(inner)}
            names |= (inside | {value.name for value in graph.output}) - own
    return names

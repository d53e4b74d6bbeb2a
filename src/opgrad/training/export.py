"""The trained model as an ordinary ONNX inference model."""

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

from opgrad.training.artifacts import ArtifactSet

if TYPE_CHECKING:
    from onnxruntime import NodeArg

ELEMENT_TYPES = {
    "tensor(float)": onnx.TensorProto.FLOAT,
    "tensor(double)": onnx.TensorProto.DOUBLE,
    "tensor(float16)": onnx.TensorProto.FLOAT16,
    "tensor(bfloat16)": onnx.TensorProto.BFLOAT16,
}


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
    source = artifacts.eval_model
    nodes = _nodes_before(source.graph, score_type.name)
    read = {name for node in nodes for name in node.input}
    inputs = [value for value in source.graph.input if value.name in read and value.name not in parameters]
    constants = [tensor for tensor in source.graph.initializer if tensor.name in read]
    trained = [numpy_helper.from_array(array, name) for name, array in parameters.items() if name in read]
    output = helper.make_tensor_value_info(score_type.name, ELEMENT_TYPES[score_type.type], list(score_type.shape))
    model = helper.make_model(
        helper.make_graph(nodes, artifacts.name, inputs, [output], constants + trained),
        producer_name="opgrad",
        ir_version=source.ir_version,
        opset_imports=source.opset_import,
        functions=source.functions,
    )
    onnx.checker.check_model(model)
    partial = Path(f"{path}.partial")
    onnx.save(model, partial)
    os.replace(partial, path)


def _nodes_before(graph: onnx.GraphProto, tensor: str) -> list[onnx.NodeProto]:
    """The nodes that a tensor depends on, in the graph's order."""
    needed, nodes = {tensor}, []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            nodes.append(node)
    return nodes[::-1]

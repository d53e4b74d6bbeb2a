"""Models to lower, and sessions that know nothing of opgrad."""

import json

import onnx
import onnxruntime
from onnx import helper


def value_info(name, array, shape=None):
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)


def graph_of(nodes, inputs, outputs, opset=15):
    """A model of 1.19.2's kind: arrays by name, of which the outputs give no more than type and rank."""
    given = [value_info(name, array, [None] * array.ndim) for name, array in inputs.items()]
    wanted = [each if isinstance(each, onnx.ValueInfoProto) else value_info(*each) for each in outputs]
    graph = helper.make_graph(nodes, "graph", given, wanted)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(model, inputs, outputs=None):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(outputs, inputs)


def feedback(model):
    return json.loads(next(entry.value for entry in model.metadata_props if entry.key == "opgrad.feedback"))


def known_shapes(model, arrays):
    """The model, which tells the sizes of its inputs."""
    for value in model.graph.input:
        value.CopyFrom(value_info(value.name, arrays[value.name], arrays[value.name].shape))
    return model

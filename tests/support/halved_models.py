"""Models in float16 and bfloat16, made of models in float32."""

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, numpy_helper

from opgrad.onnx.graph.nodes import all_nodes, subgraphs

KINDS = {TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: ml_dtypes.bfloat16}
TYPED = ("to", "dtype")


def halved(model, kind, back=False, keep=()):
    """A model with its floats in halves; back: as float32 again, rounded. keep: names that stay float32."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    nodes = list(all_nodes(model.graph.node))
    graphs = [model.graph, *(graph for node in nodes for graph in subgraphs(node))]
    tensors = [each for graph in graphs for each in graph.initializer]
    tensors += [each.t for node in nodes for each in node.attribute if each.type == AttributeProto.TENSOR]
    for tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in keep:
            array = numpy_helper.to_array(tensor).astype(KINDS[kind])
            data = array.astype(np.float32) if back else array.view(np.uint16)
            given = TensorProto.FLOAT if back else kind
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=given, dims=array.shape, raw_data=data.tobytes()))
    for graph in graphs if not back else ():
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in keep:
                value.type.tensor_type.elem_type = kind
    for each in (each for node in nodes if not back for each in node.attribute):
        if each.name in TYPED and each.i == TensorProto.FLOAT:
            each.i = kind
    for graph in graphs:
        del graph.value_info[:]
    return model

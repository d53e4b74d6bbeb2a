"""Graphs of float16 and bfloat16 that compute in float32, with weights stored as they are.

onnxruntime's CPU loads no arithmetic of bfloat16, and computes with float16 in generic code. Stored weights are cast
where they are read; what is computed of them is float32.
"""

import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from opgrad.graph.messages import HALVES, copied, free_name
from opgrad.graph.nodes import names_in, rename_inputs

TYPED = ("to", "dtype")  # attributes that name the type of a result


def compute_in_float32(model: onnx.ModelProto) -> bool:
    """Let a graph compute in float32 what it computes in float16 and bfloat16; whether it had any.

    model: changed. Its inputs and outputs of these types become float32; initializers keep theirs.
    """
    graph, taken = model.graph, names_in(model.graph)
    stored = [each.name for each in graph.initializer if each.data_type in HALVES]
    changed = [_retype(each) for each in (*graph.input, *graph.output)]
    changed += [_of_node(node) for node in graph.node]
    if not stored and not any(changed):
        return False
    names = {name: free_name(f"{name}.float32", taken) for name in stored}
    for node in graph.node:
        rename_inputs(node, names)
    to = TensorProto.FLOAT
    casts = [helper.make_node("Cast", [name], [new], f"{new}/Cast", to=to) for name, new in names.items()]
    nodes = [*casts, *map(copied, graph.node)]
    del graph.node[:]
    del graph.value_info[:]
    graph.node.extend(nodes)
    return True


def _retype(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.tensor_type
    if kind.elem_type not in HALVES:
        return False
    kind.elem_type = TensorProto.FLOAT
    return True


def _of_node(node: onnx.NodeProto) -> bool:
    """Let attributes of a node, and nodes in its bodies, say float32 where they say a half."""
    changed = False
    for each in node.attribute:
        if each.name in TYPED and each.type == AttributeProto.INT and each.i in HALVES:
            each.i, changed = TensorProto.FLOAT, True
        elif each.type == AttributeProto.TENSOR and each.t.data_type in HALVES:
            array = numpy_helper.to_array(each.t).astype("float32")
            each.t.CopyFrom(numpy_helper.from_array(array, each.t.name))
            changed = True
        elif each.type == AttributeProto.GRAPH:
            for inner in each.g.node:
                changed |= _of_node(inner)
    return changed

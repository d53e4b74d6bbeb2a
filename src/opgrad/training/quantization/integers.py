"""The integer model of a trained one: scales are numbers again, weights integers, biases int32."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.graph.messages import MICROSOFT, import_microsoft
from opgrad.graph.nodes import attributes_of
from opgrad.rules.quantization import LIMITS
from opgrad.training.quantization.blocks import stretched
from opgrad.training.quantization.learning import LOG, PAIR

BIASED = ("Conv", "Gemm")
FOUR_BITS, LEAST_BLOCK = 4, 16


def integer_model(model: onnx.ModelProto, who: str) -> onnx.ModelProto:
    """The integer model; the given one is changed."""
    graph = model.graph
    values = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    nodes = _without_logarithms(graph.node, values)
    nodes, count = _without_rounding(nodes, values)
    if not count:
        raise ValueError(f"{who}: no weight of the model is quantized, expected a trained one that `prepare` made")
    makers = {name: node for node in nodes for name in node.output}
    written = []
    for node in nodes:
        weight = makers.get(node.input[1]) if len(node.input) > 1 else None
        dequantizes = weight is not None and weight.op_type == "DequantizeLinear"
        if dequantizes and node.op_type in ("MatMul", "Gemm") and attributes_of(weight).get("block_size"):
            written += _in_four_bits(node, weight, values)
            continue
        if dequantizes and node.op_type in BIASED and len(node.input) > BIASED_PLACE:
            written += _bias(node, makers.get(node.input[0]), weight, values)
        written.append(node)
    read = {name for node in written for name in node.input} | {each.name for each in graph.output}
    used = [node for node in written if node.op_type != "DequantizeLinear" or node.output[0] in read]
    read = {name for node in used for name in node.input}
    del graph.node[:], graph.initializer[:]
    graph.node.extend(used)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items() if name in read)
    if any(node.domain == MICROSOFT for node in used):
        import_microsoft(model)
    return model


BIASED_PLACE = 2


def _without_logarithms(nodes: Mapping, values: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    """The nodes without those that make scales, which become constants."""
    scales = {node.input[1] for node in nodes if node.op_type in PAIR}
    rest = []
    for node in nodes:
        if node.op_type == "Exp" and node.output[0] in scales and node.input[0].endswith(LOG):
            values[node.output[0]] = np.exp(values[node.input[0]])
        else:
            rest.append(node)
    return rest

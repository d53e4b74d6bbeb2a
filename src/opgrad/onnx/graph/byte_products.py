"""Products of unsigned and signed bytes as products of unsigned ones: those are exact on every processor.

With AVX2 and AVX-512 but without VNNI onnxruntime adds two products of an unsigned and a signed byte in 16 bits, where
they saturate. Signed bytes become unsigned ones, 128 higher as their zero point is. Weights that 7 bits hold stay.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import copied, free_name, keep
from opgrad.onnx.graph.nodes import sorted_nodes

OF_FLOATS = ("MatMul", "Gemm", "Conv")  # which onnxruntime computes in integers between pairs
PAIR_ZERO = 2  # the place of DequantizeLinear's zero point
MOST = 64  # two products of 255 and such a number fit into 16 bits
SHIFT = 128
LIMITED = "/limited"  # behind a weight's name: the weight within MOST times the scale by which it is rounded

Place = tuple[onnx.NodeProto, int, int]  # a node, the places of a weight and its zero point


def inexact(model: onnx.ModelProto) -> Iterator[Place]:
    """Nodes that multiply unsigned by signed bytes, or unpack the latter, with the places of these and their zero."""
    if not any(facts_of(node).byte_products or node.op_type == "DequantizeLinear" for node in model.graph.node):
        return
    graph = Graph(copied(model))
    for node in graph.graph.node:
        for other, weight, zero in facts_of(node).byte_products:
            is_unsigned = other is None or graph.element_type(node.input[other]) == TensorProto.UINT8
            if is_unsigned and weight < len(node.input) and _exceeds(graph, node.input[weight]):
                yield node, weight, zero
        if node.op_type in OF_FLOATS:
            pairs = [graph.producers.get(name) for name in node.input[:2]]
            x, w = (each if each is not None and each.op_type == "DequantizeLinear" else None for each in pairs)
            if x is None or w is None or not _exceeds(graph, w.input[0]):
                continue
            if graph.element_type(x.input[0]) == TensorProto.UINT8:
                yield w, 0, PAIR_ZERO


def _exceeds(graph: Graph, name: str) -> bool:
    """Whether a value has signed bytes that 7 bits may not hold."""
    if graph.element_type(name) != TensorProto.INT8:
        return False
    maker, held = graph.producers.get(name), graph.initializers.get(name)
    if maker is not None and maker.op_type == "QuantizeLinear" and maker.input[0].endswith(LIMITED):
        return False
    if held is None or not (held.raw_data or held.int32_data):  # its values are in a file
        return True
    return bool(np.abs(numpy_helper.to_array(held).astype(np.int16)).max(initial=0) > MOST)


def with_unsigned(model: onnx.ModelProto, found: Sequence[Place]) -> onnx.ModelProto:
    """A model with unsigned bytes at these places of the given one, which is not changed."""
    places = {(node.output[0], weight): zero for node, weight, zero in found}
    model, taken, made = copied(model), Graph(model).names(), dict[str, str]()
    spread: dict[str, str] = {}  # by scales, the zero points that are made of them
    shift, middle = free_name("bytes.shift", taken), free_name("bytes.middle", taken)
    for name, kind in ((shift, np.int32), (middle, np.uint8)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(SHIFT, kind), name))
    for node in model.graph.node:
        for weight, zero in [(each[1], zero) for each, zero in places.items() if each[0] in node.output[:1]]:
            node.input.extend([""] * (zero + 1 - len(node.input)))
            for place in (weight, zero):
                name = node.input[place]
                if name:
                    node.input[place] = made.setdefault(name, free_name(f"{name}/unsigned", taken))
                elif node.op_type == "DequantizeLinear":  # its zero points have the shape of its scales
                    node.input[place] = spread.setdefault(node.input[1], free_name(f"{node.input[1]}/middle", taken))
                else:
                    node.input[place] = middle
    nodes: list[onnx.NodeProto] = []
    for name, result in made.items():  # unsigned bytes of signed ones
        wide, higher = (free_name(f"{result}/{each}", taken) for each in ("wide", "higher"))
        nodes.append(helper.make_node("Cast", [name], [wide], wide, to=TensorProto.INT32))
        nodes.append(helper.make_node("Add", [wide, shift], [higher], higher))
        nodes.append(helper.make_node("Cast", [higher], [result], result, to=TensorProto.UINT8))
    for name, result in spread.items():
        shape = free_name(f"{result}/shape", taken)
        nodes.append(helper.make_node("Shape", [name], [shape], shape))
        nodes.append(helper.make_node("Expand", [middle, shape], [result], result))
    keep(model.graph.node, sorted_nodes([*nodes, *model.graph.node]))
    return model

"""Products of packed weights that stay where they lie: onnxruntime would unpack them whole in each run.

Its MatMulNBits is fast where it has a copy of the weights in an order of its own, which constants of a session get.
Weights in mapped files are inputs of sessions. For 512 tokens and 2048 x 8192 weights of 4 bits it takes 0.49 s with
inputs and 0.28 s with constants; the operator that multiplies tiles as it unpacks them takes 0.27 s.
"""

from typing import Any

import onnx
from onnx import helper

from opgrad.onnx.graph.messages import MICROSOFT, free_name, keep
from opgrad.onnx.graph.nodes import attributes_of, names_in
from opgrad.training.files.tensor_values import is_placeholder

NBITS = {"N": 0, "K": 0, "block_size": 32, "bits": 4}  # attributes of MatMulNBits with their defaults
WIDTHS = (2, 4, 8)  # bits that opgrad's kernels unpack


def attributes_of_nbits(node: onnx.NodeProto) -> dict[str, Any] | None:
    """The attributes of MatMulNBits as opgrad's operators have them; None for weights that they do not unpack."""
    given = attributes_of(node)
    sizes = {name: given.get(name, default) for name, default in NBITS.items()}
    if given.get("weight_prepacked", 0) or sizes["bits"] not in WIDTHS:
        return None
    sizes["column_block"] = sizes.pop("block_size")
    return {**sizes, "zero_point": 2.0 ** (sizes["bits"] - 1)}


def use_tiles(model: onnx.ModelProto) -> None:
    """Let opgrad's operator compute the products of packed weights whose values are apart from the model.

    y = x · Wᵀ is the gradient of a product with the transpose of W, of which W has the columns in its rows.
    """
    graph, apart = model.graph, {each.name for each in model.graph.initializer if is_placeholder(each)}
    taken, nodes = names_in(graph), list[onnx.NodeProto]()
    for node in graph.node:
        given = attributes_of_nbits(node) if node.op_type == "MatMulNBits" and node.input[1] in apart else None
        if given is None:
            nodes.append(node)
            continue
        *inputs, bias = [*node.input, "", "", ""][:6]
        given["N"], given["K"] = given["K"], given["N"]
        y = free_name(f"{node.output[0]}.product", taken) if bias else node.output[0]
        made = helper.make_node("QuantizedMatMulGrad", inputs, [y], node.name, domain=MICROSOFT, transB=0, **given)
        nodes.append(made)
        if bias:
            nodes.append(helper.make_node("Add", [y, bias], [node.output[0]], free_name(f"{node.name}/Add", taken)))
    keep(graph.node, nodes)

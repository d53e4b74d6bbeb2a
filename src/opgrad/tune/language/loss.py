"""The loss of a language model: its last product and cross-entropy, as one node where the product's weights are frozen.

That node computes the scores of some tokens at a time. 512 tokens and 128,256 words are 263 MB of float32 otherwise, a
few times over.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import HALVES, MICROSOFT, domain_of, import_microsoft, keep
from opgrad.onnx.graph.nodes import attributes_of, needed
from opgrad.tune.language.packed_weights import attributes_of_nbits

LABELS, WEIGHTS, LOSS = "labels", "weights", "loss"
EACH = "loss/each"  # the losses of tokens
IGNORED = -100  # the label of a token that does not count
SCOPE = "loss/"


class Head(NamedTuple):
    """The last product as the loss takes it: its node, what it reads behind the labels, and attributes."""

    node: onnx.NodeProto
    weight: str
    others: Sequence[str]
    attributes: dict[str, Any]


def add_loss(
    model: onnx.ModelProto, hidden: str, logits: str, trained: Collection[str], with_scores: bool = False,
    weighted: bool = False, each: bool = False,
) -> None:  # fmt: skip
    """Give a model the loss as its only output, and labels as an input.

    hidden, logits: what the last product computes the scores from, and the scores. trained: names of weights.
    with_scores: whether the graph computes the scores, as a value of its own, in any case. weighted: whether weights of
    the tokens' losses, which the mean is over, are an input, too. each: whether `EACH`, [tokens], is the output.
    """
    graph = Graph(model)
    head, rows = None if with_scores else _head(graph, hidden, logits, trained), f"{SCOPE}rows"
    model.graph.input.append(helper.make_tensor_value_info(LABELS, TensorProto.INT64, ["batch", "length"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), rows))
    labels = f"{SCOPE}flat_labels"
    nodes = [helper.make_node("Reshape", [LABELS, rows], [labels], f"{SCOPE}Reshape_labels")]
    scores, width = (logits, graph.sizes(logits)) if head is None else (hidden, [head.attributes["K"]])
    shape = np.array([-1, (width or [None])[-1] or 0], np.int64)
    model.graph.initializer.append(numpy_helper.from_array(shape, f"{SCOPE}shape"))
    flat = f"{SCOPE}flat_{'logits' if head is None else 'hidden'}"
    nodes.append(helper.make_node("Reshape", [scores, f"{SCOPE}shape"], [flat], f"{SCOPE}Reshape_scores"))
    weights = f"{SCOPE}flat_weights"
    if weighted:
        model.graph.input.append(helper.make_tensor_value_info(WEIGHTS, TensorProto.FLOAT, ["batch", "length"]))
        nodes.append(helper.make_node("Reshape", [WEIGHTS, rows], [weights], f"{SCOPE}Reshape_weights"))
    result = EACH if each or (weighted and head is None) else LOSS
    if head is None:
        op, inputs, domain = "SoftmaxCrossEntropyLoss", [flat, labels], ""
        attributes: dict[str, Any] = {}
    else:
        op, inputs, domain = "LinearCrossEntropyLoss", [flat, head.weight, labels, *head.others], MICROSOFT
        inputs += [*[""] * (5 - len(inputs)), weights] if weighted else []
        attributes = head.attributes
        import_microsoft(model)
    attributes = {**attributes, "ignore_index": IGNORED, **({} if result == LOSS else {"reduction": "none"})}
    nodes.append(helper.make_node(op, inputs, [result], f"{SCOPE}{op}", domain=domain, **attributes))
    if result != LOSS and not each:
        product, sums = f"{SCOPE}products", [f"{SCOPE}sum_of_{name}" for name in ("products", "weights")]
        nodes.append(helper.make_node("Mul", [result, weights], [product], f"{SCOPE}Mul"))
        nodes.append(helper.make_node("ReduceSum", [product], sums[:1], sums[0], keepdims=0))
        nodes.append(helper.make_node("ReduceSum", [weights], sums[1:], sums[1], keepdims=0))
        nodes.append(helper.make_node("Div", sums, [LOSS], f"{SCOPE}Div"))
    model.graph.node.extend(nodes)
    del model.graph.output[:]
    result = EACH if each else LOSS
    model.graph.output.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, ["tokens"] if each else []))
    keep(model.graph.node, needed(list(model.graph.node), [result]))


def _head(graph: Graph, hidden: str, logits: str, trained: Collection[str]) -> Head | None:
    """The last product, if its weights stay as they are and nothing comes between it and the loss."""
    while (copy := graph.maker(logits, "Identity", "Cast")) is not None:
        logits = copy.input[0]
    node = graph.producers.get(logits)
    if node is None or node.input[0] != hidden:
        return None
    found = _packed(node) if domain_of(node) == MICROSOFT else _whole(graph, node)
    return None if found is None or {found.weight, *node.input}.intersection(trained) else found


def _packed(node: onnx.NodeProto) -> Head | None:
    """That of quantized weights."""
    inputs = [*node.input, "", "", ""]
    given = attributes_of_nbits(node) if node.op_type == "MatMulNBits" else None
    if given is None or inputs[4] or inputs[5]:
        return None
    others = [inputs[2], inputs[3]] if inputs[3] else [inputs[2]]
    return Head(node, inputs[1], others, given)


def _whole(graph: Graph, node: onnx.NodeProto) -> Head | None:
    """That of float weights, which may be cast or transposed on the way."""
    given = attributes_of(node)
    plain = not given.get("transA", 0) and given.get("alpha", 1.0) == 1 and len(node.input) == 2
    if node.op_type not in ("MatMul", "Gemm") or not plain:
        return None
    weight, transposed = node.input[1], bool(given.get("transB", 0))
    while (maker := graph.maker(weight, "Cast", "Transpose", "Identity")) is not None:
        transposed ^= maker.op_type == "Transpose"
        weight = maker.input[0]
    sizes, kind = graph.known(weight), graph.element_type(weight)
    stored = kind in (TensorProto.FLOAT, *HALVES)
    if weight not in graph.initializers or sizes is None or len(sizes) != 2 or not stored:
        return None
    n, k = sizes if transposed else reversed(sizes)
    return Head(node, weight, [], {"N": n, "K": k, "transB": int(transposed)})

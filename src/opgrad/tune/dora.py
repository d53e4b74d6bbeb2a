"""Adapters that also learn the length of each column of a weight (DoRA): what the base's columns are like.

y = (x · W + x · A · B · scale) · m / |W + A · B · scale|, the norm of each column, which counts as a constant where
gradients are concerned. |w + a b|² = |w|² + 2 b · (aᵀ w) + b · (aᵀ a) b: of W the training graph needs the norms and a
product with Aᵀ alone, so that W stays as it lies.

Source: DoRA, arXiv 2402.09353.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.ops.quantized import floats_of
from opgrad.training.files.tensor_values import Held, array_of
from opgrad.tune.language.model import WHO, LanguageModel
from opgrad.tune.language.packed_weights import attributes_of_nbits
from opgrad.tune.lora import Adapter

COLUMNS = 64  # that are unpacked at once
FLOATS = ("MatMul", "Gemm", "FusedMatMul")


def squared_norms(base: LanguageModel, adapter: Adapter, added: np.ndarray | None = None) -> np.ndarray:
    """The squared norm of each column of the weight to which an adapter adds, float64 [outputs].

    added: what is added to the weight before, [inputs, outputs].
    Raises NotImplementedError for a weight that is no float tensor and none of MatMulNBits.
    """
    norms = np.empty(adapter.outputs)
    for start, columns in columns_of(base, adapter):
        place = slice(start, start + len(columns))
        whole = columns if added is None else columns + added[:, place].T
        np.einsum("oi,oi->o", whole, whole, out=norms[place])
    return norms


def factors(base: LanguageModel, adapter: Adapter, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """What the results of an adapter's product are multiplied with, float64 [outputs]."""
    low = values[adapter.a].astype(np.float64) @ values[adapter.b] * adapter.lora.scale
    return np.asarray(values[adapter.magnitude] / np.sqrt(squared_norms(base, adapter, low)))


def bias_of(node: onnx.NodeProto) -> str:
    """The name of what a product's node adds to its result; "" if there is nothing."""
    place = facts_of(node).bias
    bias = node.input[place] if place and place < len(node.input) else ""
    if bias and attributes_of(node).get("beta", 1.0) != 1:
        raise NotImplementedError(f"{WHO}: {node.op_type} (node {node.name!r}) has a beta, beside which is no DoRA")
    return bias


def columns_of(base: LanguageModel, adapter: Adapter) -> Iterator[tuple[int, np.ndarray]]:
    """Some columns of a weight at a time, as rows of float64, each time with the number of the first."""
    held = {each.name: each for each in base.model.graph.initializer} | dict(base.values)
    node = next(node for node in base.model.graph.node if adapter.product.output in node.output)
    packed = attributes_of_nbits(node) if node.op_type == "MatMulNBits" else None
    plain = node.op_type in FLOATS and adapter.product.trainable
    if packed is None and not plain:
        raise NotImplementedError(
            f"{WHO}: {adapter.product.op} (node {node.name!r}) has no weight of floats or of MatMulNBits, beside which "
            "DoRA is done"
        )
    for first in range(adapter.first, adapter.last, COLUMNS):
        last = min(first + COLUMNS, adapter.last)
        if packed is not None:
            yield first - adapter.first, _unpacked(node, held, packed, first, last)
            continue
        given, weight = attributes_of(node), array_of(held[adapter.product.weight])
        part = weight[first:last] if given.get("transB") else weight[:, first:last].T
        yield first - adapter.first, part.astype(np.float64) * given.get("alpha", 1.0)


def _unpacked(
    node: onnx.NodeProto, held: Mapping[str, Held], packed: Mapping[str, int], first: int, last: int
) -> np.ndarray:
    """Some columns of the weight of MatMulNBits, which are rows of its bytes."""
    found = [array_of(held[name]) if name in held else None for name in (*node.input[1:5], "", "", "")[:4]]
    b, scales, zeros, groups = found
    assert b is not None
    assert scales is not None
    rows, given = packed["N"], {**packed, "N": last - first, "row_block": 1, "transB": True}
    b, scales, zeros = (
        None if each is None else np.ascontiguousarray(each.reshape(rows, -1)[first:last])
        for each in (b, scales, zeros)
    )
    assert b is not None
    assert scales is not None
    return floats_of(b, scales.astype(np.float32), zeros, groups, given, False, packed["zero_point"])

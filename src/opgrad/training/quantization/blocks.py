"""Pairs for weights of 4 bits: those of products in blocks, as MatMulNBits has them, and those of convolutions."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from opgrad.onnx.graph.nodes import attributes_of
from opgrad.training.quantization.placement import WHO, Choose, simplified

LEAST_OPSET = 21  # which has 4 bits, and blocks
BLOCK = 32  # rows of a weight that have one scale
LARGEST = 7
MATRIX = 2


def placed(
    model: onnx.ModelProto, per_channel: bool, choose: Choose | None
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model with pairs and integer weights, and the float weights by name. choose: those quantized; None: all."""
    simple = simplified(model, LEAST_OPSET)
    graph = simple.graph
    values = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    found: dict[str, dict[str, Any]] = dict(_weights(graph, values, per_channel))
    if not found:
        raise ValueError(f"{WHO}: the model has no MatMul, Gemm or Conv with a constant weight, expected one for int4")
    if choose is not None:
        chosen = choose(found)
        found = {name: attributes for name, attributes in found.items() if name in chosen}
    made: list[onnx.NodeProto] = []
    for name, attributes in found.items():
        axis, block = attributes.get("axis"), attributes.get("block_size")
        scale = scales(values[name], axis, block)
        integers = np.clip(
            np.rint(values[name] / stretched(scale, values[name].shape, axis, block)), -LARGEST - 1, LARGEST
        )
        tensors = {
            f"{name}_quantized": integers.astype(ml_dtypes.int4),
            f"{name}_scale": scale,
            f"{name}_zero_point": np.zeros(scale.shape, ml_dtypes.int4),
        }
        graph.initializer.extend(numpy_helper.from_array(array, each) for each, array in tensors.items())
        made.append(
            helper.make_node("DequantizeLinear", list(tensors), [f"{name}_floats"], f"{name}_floats", **attributes)
        )
    for node in graph.node:
        if len(node.input) > 1 and node.input[1] in found and node.op_type in ("MatMul", "Gemm", "Conv"):
            node.input[1] = f"{node.input[1]}_floats"
    nodes = [*made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return simple, values


def _weights(
    graph: onnx.GraphProto, values: dict[str, np.ndarray], per_channel: bool
) -> Iterator[tuple[str, dict[str, int]]]:
    """The weights that are quantized, with the attributes of their pairs."""
    for node in graph.node:
        name = node.input[1] if len(node.input) > 1 else ""
        if name not in values or values[name].dtype != np.float32:
            continue
        told = attributes_of(node)
        if node.op_type == "Conv":
            yield name, {"axis": 0} if per_channel else {}
        elif node.op_type == "MatMul" and values[name].ndim == MATRIX:
            yield name, {"axis": 0, "block_size": BLOCK}
        elif node.op_type == "Gemm" and not told.get("transA") and told.get("alpha", 1.0) == told.get("beta", 1.0) == 1:
            yield name, {"axis": told.get("transB", 0), "block_size": BLOCK}


def scales(w: np.ndarray, axis: int | None, block: int | None) -> np.ndarray:
    """The scales of a weight, float32: of those that leave its largest numbers out more and more, the best for each.

    axis: along which there are several; None: one for all. block: numbers along the axis with one scale; None: each
    place of the axis has one.
    """
    best, least = None, None
    for part in np.linspace(0.5, 1.0, 21):
        scale = np.maximum(_reduced(np.maximum, np.abs(w), axis, block) * part / LARGEST, np.finfo(np.float32).tiny)
        scale = scale.astype(np.float32)
        wide = stretched(scale, w.shape, axis, block)
        error = _reduced(np.add, (np.clip(np.rint(w / wide), -LARGEST - 1, LARGEST) * wide - w) ** 2, axis, block)
        best = scale if best is None else np.where(error < least, scale, best)
        least = error if least is None else np.minimum(error, least)
    assert best is not None
    return best


def _reduced(function: np.ufunc, a: np.ndarray, axis: int | None, block: int | None) -> np.ndarray:
    """A number for all, for each place of an axis, or for each block along it."""
    if axis is None:
        return np.asarray(function.reduce(a, axis=None))
    if block is None:
        return np.asarray(function.reduce(a, axis=tuple(each for each in range(a.ndim) if each != axis)))
    return np.asarray(function.reduceat(a, np.arange(0, a.shape[axis], block), axis=axis))


def stretched(scale: np.ndarray, shape: tuple[int, ...], axis: int | None, block: int | None) -> np.ndarray:
    """Scales, or zero points, in a shape that broadcasts to the weight's."""
    if axis is None or scale.ndim == 0:
        return scale
    if block is None:
        return scale.reshape([-1 if each == axis else 1 for each in range(len(shape))])
    return np.take(scale, np.arange(shape[axis]) // block, axis=axis)

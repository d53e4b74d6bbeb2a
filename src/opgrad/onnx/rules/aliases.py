"""Operators of onnxruntime that are one or a few of ai.onnx under other names."""

import numpy as np

from opgrad.onnx.graph.formulas import LAST, Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.graph.node_view import fused_product
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import NoGradient, decomposition, recomputed


@decomposition("TransposeMatMul", domain=MICROSOFT)
def transpose_matmul(node: Node) -> Value:
    """y = alpha * a @ b, either of them transposed."""
    return fused_product(node)


@decomposition("GatherND", "Pad", "Trilu", domain=MICROSOFT)
def same_of_ai_onnx(node: Node) -> Value:
    """That of the operator of this name in ai.onnx."""
    return node.body.node(node.proto.op_type, *node.inputs, **node.attributes)


@decomposition("GridSample", domain=MICROSOFT)
def grid_sample(node: Node) -> Value:
    """That of GridSample in ai.onnx, whose modes have other names from opset 20 on."""
    modes = {} if node.opset < 20 else {"bilinear": "linear", "bicubic": "cubic"}
    mode = node.get("mode", "bilinear")
    return node.body.node("GridSample", *node.inputs, **{**node.attributes, "mode": modes.get(mode, mode)})


@decomposition("ExpandDims", domain=MICROSOFT)
def expand_dims(node: Node) -> Value:
    """y = x with a new axis."""
    axis = node.constant(1)
    if axis is None:
        raise NoGradient("its axis is known at run time alone")
    place = int(axis.reshape(()))
    return node.x.unsqueeze(place % (node.rank() + 1))


@decomposition("SampleOp", domain=MICROSOFT)
def sample_op(node: Node) -> Value:
    """y = x."""
    return node.x.apply("Identity")


@decomposition("UnfoldTensor", domain=MICROSOFT)
def unfold_tensor(node: Node) -> Value:
    """y[.., i, .., j] = x[.., i * step + j, ..]."""
    rank = node.rank()
    axis, size, step = node.get("dim", -1) % rank, node.get("size"), node.get("step", 1)
    body, length = node.body, node.x.shape(axis, axis + 1).squeeze(0)
    starts = body.node("Range", body.constant(np.array(0)), length - (size - 1), body.constant(np.array(step)))
    rows = body.node("Gather", node.x, starts.unsqueeze(1) + body.ints(range(size)), axis=axis)
    # The axis of the elements of a window stands behind that of the windows.
    return rows.transpose(*(each for each in range(rank + 1) if each != axis + 1), axis + 1)


@recomputed("CDist", domain=MICROSOFT)
def cdist(node: Node) -> Value:
    """c[i, j] = sqrt(sum((a[i] - b[j])**2)), or without the root."""
    difference = node.x.unsqueeze(1) - node.required(1).unsqueeze(0)
    return difference.along(
        "ReduceL2" if node.get("metric", "sqeuclidean") == "euclidean" else "ReduceSumSquare", [2], keepdims=0
    )


@recomputed("ConvTransposeWithDynamicPads", domain=MICROSOFT, constant=(2,))
def conv_transpose_with_dynamic_pads(node: Node) -> Value:
    """That of ConvTranspose, whose pads have to be the same in every run."""
    pads = node.constant(2)
    if node.input(2) is not None and pads is None:
        raise NoGradient("its pads are known at run time alone")
    given = {} if pads is None else {"pads": pads.tolist()}
    return node.body.node("ConvTranspose", node.x, node.required(1), node.input(3), **node.attributes, **given)


# --- old operators of ai.onnx, which onnxruntime still has ---


@decomposition("Affine")
def affine(node: Node) -> Value:
    """y = alpha * x + beta."""
    return node.x * node.get("alpha", 1.0) + node.get("beta", 0.0)


@decomposition("Scale")
def scale(node: Node) -> Value:
    """y = scale * x."""
    return node.x * node.get("scale", 1.0)


@decomposition("ScaledTanh")
def scaled_tanh(node: Node) -> Value:
    """y = alpha * tanh(beta * x)."""
    return (node.x * node.get("beta", 1.0)).apply("Tanh") * node.get("alpha", 1.0)


@decomposition("ParametricSoftplus")
def parametric_softplus(node: Node) -> Value:
    """y = alpha * softplus(beta * x)."""
    return (node.x * node.get("beta", 1.0)).apply("Softplus") * node.get("alpha", 1.0)


@decomposition("ImageScaler")
def image_scaler(node: Node) -> Value:
    """y = scale * x + bias of each channel."""
    bias = node.body.constant(np.array(node.get("bias", []), np.float32)).reshape([1, -1, 1, 1])
    return node.x * node.get("scale", 1.0) + bias


@decomposition("Crop")
def crop(node: Node) -> Value:
    """y = x without its border, or a part of a fixed size behind it."""
    (left, top, right, bottom), size = node.get("border", []), node.get("scale", []) or None
    ends = [-bottom or LAST, -right or LAST] if size is None else [top + size[0], left + size[1]]
    return node.x.slice(top, ends[0], 2).slice(left, ends[1], 3)


@decomposition("DynamicSlice")
def dynamic_slice(node: Node) -> Value:
    """That of Slice."""
    return node.body.node("Slice", *node.inputs)

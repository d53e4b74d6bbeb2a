"""Constants of a graph: the values in Constant nodes, and the results of single nodes, computed here."""

import math
from typing import Any

import numpy as np
import onnx
from onnx import TypeProto, helper, numpy_helper, shape_inference

from opgrad.onnx.graph.messages import FLOATS, names_of
from opgrad.onnx.graph.sizes import known, sizes_in

LARGEST_FOLDED = 1 << 19  # the most bytes of a constant that is computed here, and of all of its inputs together
LARGEST_IN_ALL = 1 << 26  # the most bytes of all of them, of a graph
AMPLIFIED = 8  # constants that become a part of a graph have at most so many times the bytes of those that it had
FOLDED = names_of(
    """
    Shape Size Gather Concat Unsqueeze Squeeze Slice Cast Add Sub Mul Div Neg Floor Ceil Range ConstantOfShape
    Identity Reshape Min Max Equal Where Transpose Expand Not And Or Less Greater ReduceProd Mod Sqrt Reciprocal Pow
    """
)


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant node; None if it is text or sparse."""
    attribute = next(iter(node.attribute), onnx.AttributeProto())
    if attribute.name == "value":
        return attribute.t
    kinds: dict[str, Any] = {
        "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64
    }  # fmt: skip
    kind = kinds.get(attribute.name)
    return numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), kind)) if kind else None


def is_exact(node: onnx.NodeProto, inputs: list[np.ndarray]) -> bool:
    """Whether ONNX's reference evaluator and all runtimes give the same result."""
    if node.op_type in ("Div", "Mod") and inputs[0].dtype.kind == "i":
        return bool((inputs[1] > 0).all() and (inputs[0] >= 0).all())  # quotients below 0 are rounded differently
    if node.op_type in ("Cast", "CastLike") and inputs[0].dtype.kind not in "iub" and not _casts_to_float(node):
        return bool(np.isfinite(inputs[0].astype(np.float64)).all())  # the integer for NaN or infinity is not defined
    return True


def _casts_to_float(node: onnx.NodeProto) -> bool:
    return any(each.name == "to" and each.i in FLOATS for each in node.attribute)


def evaluate(node: onnx.NodeProto, inputs: list[np.ndarray], opset: int, most: int) -> list[np.ndarray] | None:
    """The results of a single node of ai.onnx; None if they would take more bytes than `most`, or are not known.

    The sizes of the results are inferred from the inputs first, as a node of a few bytes can ask for any memory.
    """
    from onnx.reference import ReferenceEvaluator

    if not is_exact(node, inputs):
        return None
    names = [name for name in node.input if name]
    tensors = [numpy_helper.from_array(each, name) for name, each in zip(names, inputs, strict=True)]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "node", [], outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        inferred = [each.type.tensor_type for each in shape_inference.infer_shapes(model).graph.output]
        if sum(map(_bytes, inferred)) > most:
            return None
        with np.errstate(all="ignore"):
            return [np.asarray(each) for each in ReferenceEvaluator(model).run(None, {})]
    except Exception:  # the node is wrong or the evaluator lacks the type; whatever runs the model reports an error
        return None


def _bytes(declared: TypeProto.Tensor) -> float:
    """The bytes of a tensor of this type; infinitely many if they are not known."""
    sizes = known(sizes_in(declared))
    if sizes is None or not declared.elem_type:
        return math.inf
    return math.prod(sizes) * helper.tensor_dtype_to_np_dtype(declared.elem_type).itemsize

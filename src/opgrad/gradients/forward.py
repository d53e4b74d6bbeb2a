"""What is known of the values of a model: element types, sizes, and the values of constants."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference
from onnx.external_data_helper import uses_external_data

from opgrad.gradients.sizes import Sizes, forget_vague, sizes_in
from opgrad.onnxruntime.messages import MICROSOFT, domain_of, opset_of
from opgrad.onnxruntime.opset import all_nodes, raise_opset

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
KNOWN_BEST = 17  # opset whose shapes onnx infers where those of an older one are the same
LARGEST_READ = 1024  # elements of a tensor whose values can matter to shapes
LARGEST_FOLDED = 1 << 16  # elements of a constant that is computed here
# Operators that onnx infers nothing of, and the one of ai.onnx that gives results of the same types and shapes: its
# name, how many inputs and outputs it takes of theirs, and which attributes.
STANDING_FOR: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            *("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasSoftmax", "BatchNormInternal", "FakeQuant"),
            *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization"),
            *("RotaryEmbedding", "GroupNormalization"),
        ),
        ("Identity", 1, 1, ()),
    ),
    "ConcatTraining": ("Concat", 2**31, 1, ("axis",)),
    "SoftmaxCrossEntropyLossInternal": ("SoftmaxCrossEntropyLoss", 3, 2, ("reduction",)),
}
OF_AI_ONNX = ("SimplifiedLayerNormalization", "GroupNormalization")  # among these; the others are com.microsoft's
FOLDED = (
    *("Shape", "Size", "Gather", "Concat", "Unsqueeze", "Squeeze", "Slice", "Cast", "Add", "Sub", "Mul", "Div"),
    *("Neg", "Floor", "Ceil", "Range", "ConstantOfShape", "Identity", "Reshape", "Min", "Max", "Equal", "Where"),
    *("Transpose", "Expand", "Not", "And", "Or", "Less", "Greater", "ReduceProd", "Mod", "Sqrt", "Reciprocal", "Pow"),
)


def title(node: onnx.NodeProto) -> str:
    """How messages call a node."""
    operator = f"{node.domain}.{node.op_type}" if domain_of(node) else node.op_type
    return (
        f"{operator} (node {node.name!r})"
        if node.name
        else f"{operator} (the node that makes {next(filter(None, node.output), '')!r})"
    )


class Forward:
    """A model, and what its graph tells of its values.

    variable: names of values that are no constants, although the graph has them as such: they will be trained.
    """

    def __init__(self, model: onnx.ModelProto, variable: Iterable[str] = ()):
        self.model, self.graph, self._variable = model, model.graph, frozenset(variable)
        self.opset = opset_of(model)
        self.refresh()

    def refresh(self) -> None:
        """Look at the graph anew."""
        self.initializers = {each.name: each for each in self.graph.initializer}
        self.producers = {name: node for node in self.graph.node for name in node.output if name}
        self._types = infer(self.model)
        self._folded: dict[str, np.ndarray | None] = {}

    def names(self) -> set[str]:
        """Every name of the graph, those of values and those of nodes."""
        values = {each.name for each in (*self.graph.input, *self.graph.initializer)}
        inner = {name for node in all_nodes(self.graph.node) for name in (node.name, *node.output)}
        return {*values, *inner, *(node.name for node in self.graph.node)}

    def element_type(self, name: str) -> int | None:
        """The TensorProto.DataType of a value, None if it is not known."""
        known = self._types.get(name)
        return known.elem_type or None if known is not None else None

    def sizes(self, name: str) -> Sizes | None:
        """Of each axis an int, a symbol, or None; None if not even the rank is known."""
        return sizes_in(self._types.get(name))

    def declare(self, name: str, element_type: int, sizes: Sizes | None) -> None:
        """Tell of a value that was added."""
        self._types[name] = helper.make_tensor_type_proto(element_type, sizes).tensor_type

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a tensor that is the same in every run; None if it is not, or is large and computed."""
        if name not in self._folded:
            self._folded[name] = None  # against a model whose nodes read themselves
            self._folded[name] = self._constant(name)
        return self._folded[name]

    def _constant(self, name: str) -> np.ndarray | None:
        if name in self._variable:
            return None
        if name in self.initializers:
            tensor = self.initializers[name]
            return None if uses_external_data(tensor) else numpy_helper.to_array(tensor)
        node = self.producers.get(name)
        if node is None or domain_of(node):
            return None
        if node.op_type == "Constant":
            tensor = constant_tensor(node)
            return None if tensor is None else numpy_helper.to_array(tensor)
        return self._fold(node) if node.op_type in FOLDED else None

    def _fold(self, node: onnx.NodeProto) -> np.ndarray | None:
        if node.op_type in ("Shape", "Size"):
            sizes = self.sizes(node.input[0])
            if sizes is None or not all(isinstance(size, int) for size in sizes):
                return None
            inputs = [np.broadcast_to(np.zeros((), np.int8), [int(size or 0) for size in sizes])]
        else:
            found = [self.constant(name) if name else None for name in node.input]
            if any(value is None and name for value, name in zip(found, node.input, strict=True)):
                return None
            inputs = [value for value in found if value is not None]
            if sum(value.size for value in inputs) > LARGEST_FOLDED or len(inputs) < len(found):
                return None
            if not is_exact(node, inputs):
                return None
        return evaluate(node, inputs, self.opset)[0]


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
    """Whether the reference evaluator gives what runtimes give."""
    if node.op_type in ("Div", "Mod") and inputs[0].dtype.kind == "i":
        return bool((inputs[1] > 0).all() and (inputs[0] >= 0).all())  # how negative ones are rounded differs
    if node.op_type in ("Cast", "CastLike") and inputs[0].dtype.kind not in "iub":
        return bool(np.isfinite(inputs[0].astype(np.float64)).all())  # NaN as an integer is anything
    return True


def evaluate(node: onnx.NodeProto, inputs: list[np.ndarray], opset: int) -> list[np.ndarray]:
    """The results of a single node of ai.onnx."""
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.input if name]
    types = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "node", types, [onnx.ValueInfoProto(name=name) for name in node.output if name])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    with np.errstate(all="ignore"):
        return [np.asarray(each) for each in ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))]


def infer(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """The types of all values of a model's graph that can be known, by name."""
    stand_in = _stand_in(model)
    with suppress(NotImplementedError):  # of older opsets onnx knows less of how shapes are computed
        raise_opset(stand_in, KNOWN_BEST)
    inferred = shape_inference.infer_shapes(stand_in, data_prop=True).graph
    found = {each.name: each.type.tensor_type for each in (*inferred.input, *inferred.output, *inferred.value_info)}
    for tensor in model.graph.initializer:
        found[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type
    return found


def _stand_in(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the same shapes: large constants are inputs, and operators that onnx does not know are others."""
    large = [each for each in model.graph.initializer if np.prod(each.dims) > LARGEST_READ]
    kept = [each for each in model.graph.initializer if np.prod(each.dims) <= LARGEST_READ]
    given = {each.name for each in model.graph.input}
    inputs = [
        *model.graph.input,
        *(
            helper.make_tensor_value_info(each.name, each.data_type, each.dims)
            for each in large
            if each.name not in given
        ),
    ]
    graph = helper.make_graph(
        list(map(_stand_in_for, model.graph.node)), "graph", inputs, model.graph.output, kept,
        value_info=model.graph.value_info,
    )  # fmt: skip
    result = helper.make_model(graph, opset_imports=model.opset_import, functions=model.functions)
    result.ir_version = model.ir_version
    for value in (*result.graph.input, *result.graph.output, *result.graph.value_info):
        forget_vague(value.type)
    return result


def _stand_in_for(node: onnx.NodeProto) -> onnx.NodeProto:
    standing = STANDING_FOR.get(node.op_type)
    named = {each.name: each for each in node.attribute}
    if standing is None or not (domain_of(node) == MICROSOFT or node.op_type in OF_AI_ONNX) or "output_type" in named:
        return node
    op, inputs, outputs, attributes = standing
    other = helper.make_node(op, node.input[:inputs], node.output[:outputs])
    other.attribute.extend(named[name] for name in attributes if name in named)
    return other

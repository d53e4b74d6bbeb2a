"""What is known of the values of a model: element types, sizes, and the values of constants."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper, shape_inference
from onnx.external_data_helper import uses_external_data

from opgrad.graph.inference import infer, shapes_given
from opgrad.graph.large import LARGE
from opgrad.graph.messages import domain_of, opset_of
from opgrad.graph.nodes import names_in
from opgrad.graph.sizes import Sizes, known, sizes_in

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
LARGEST_FOLDED = 1 << 19  # the most bytes of a constant that is computed here, and of all of its inputs together
FOLDED = (
    *("Shape", "Size", "Gather", "Concat", "Unsqueeze", "Squeeze", "Slice", "Cast", "Add", "Sub", "Mul", "Div"),
    *("Neg", "Floor", "Ceil", "Range", "ConstantOfShape", "Identity", "Reshape", "Min", "Max", "Equal", "Where"),
    *("Transpose", "Expand", "Not", "And", "Or", "Less", "Greater", "ReduceProd", "Mod", "Sqrt", "Reciprocal", "Pow"),
)


def title(node: onnx.NodeProto) -> str:
    """The node's name in messages."""
    operator = f"{node.domain}.{node.op_type}" if domain_of(node) else node.op_type
    return (
        f"{operator} (node {node.name!r})"
        if node.name
        else f"{operator} (the node that makes {next(filter(None, node.output), '')!r})"
    )


class Forward:
    """A model, with the types, sizes and constants of its graph's values.

    variable: the names of initializers that do not count as constants because they will be trained.
    """

    def __init__(self, model: onnx.ModelProto, variable: Iterable[str] = ()):
        self.model, self.graph, self._variable = model, model.graph, frozenset(variable)
        self.opset = opset_of(model)
        self.refresh()

    def refresh(self) -> None:
        """Read the graph again, after its nodes were changed."""
        self.initializers = {each.name: each for each in self.graph.initializer}
        self.quantized: set[str] | None = None  # see backward.quantized
        self.producers = {name: node for node in self.graph.node for name in node.output if name}
        self._types: dict[str, TypeProto.Tensor] = {}
        self._folded: dict[str, np.ndarray | None] = {}
        self._types = infer(self.model, self._known_shapes)
        self._folded = {name: value for name, value in self._folded.items() if value is not None}

    def _known_shapes(self, types: dict[str, TypeProto.Tensor]) -> dict[str, np.ndarray]:
        """The constants among the `shapes_given`, by name. types: the types of all values."""
        self._types = types
        asked = {name for node in self.graph.node for name in shapes_given(node)} - self.initializers.keys()
        found = {name: self.constant(name) for name in asked}
        return {name: value for name, value in found.items() if value is not None and value.size <= LARGE}

    def names(self) -> set[str]:
        """Every name of the graph, those of values and those of nodes."""
        return names_in(self.graph)

    def element_type(self, name: str) -> int | None:
        """The TensorProto.DataType of a value, None if it is not known."""
        known = self._types.get(name)
        return known.elem_type or None if known is not None else None

    def sizes(self, name: str) -> Sizes | None:
        """For each axis an int, a name, or None if its size is unknown; None for the whole if the rank is unknown."""
        return sizes_in(self._types.get(name))

    def declare(self, name: str, element_type: int, sizes: Sizes | None) -> None:
        """Record type and sizes of a value that was added to the graph."""
        self._types[name] = helper.make_tensor_type_proto(element_type, sizes).tensor_type

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a tensor that is the same in every run; None if it varies, or takes much memory to compute."""
        if name not in self._folded:
            self._folded[name] = None  # ends the recursion in a damaged model whose nodes form a circle
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
            return self._of_sizes(node)
        found = [self.constant(name) if name else None for name in node.input]
        inputs = [value for value in found if value is not None]
        if len(inputs) < len(found) or sum(value.nbytes for value in inputs) > LARGEST_FOLDED:
            return None
        results = evaluate(node, inputs, self.opset, LARGEST_FOLDED)
        return results[0] if results is not None else None

    def _of_sizes(self, node: onnx.NodeProto) -> np.ndarray | None:
        """The result of a Shape or Size node if all sizes are known."""
        sizes = known(self.sizes(node.input[0]))
        if sizes is None:
            return None
        if node.op_type == "Shape":
            given = {each.name: each.i for each in node.attribute}
            return np.array(sizes[given.get("start", 0) : given.get("end", len(sizes))], np.int64)
        count = math.prod(sizes)
        return np.array(count, np.int64) if count <= np.iinfo(np.int64).max else None


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
    if node.op_type in ("Cast", "CastLike") and inputs[0].dtype.kind not in "iub":
        return bool(np.isfinite(inputs[0].astype(np.float64)).all())  # the integer for NaN or infinity is not defined
    return True


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

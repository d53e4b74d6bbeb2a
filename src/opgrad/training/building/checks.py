"""What is wrong with a model, in one sentence."""

import difflib
from collections.abc import Collection, Iterable

import onnx
from onnx import checker, helper

from opgrad.training.building.values import LARGE, size_of


def check_built(model: onnx.ModelProto, who: str) -> None:
    """Raise ValueError if a graph does not hold together: names that nothing makes, or that are made twice."""
    try:
        checker.check_model(_without_values(model))
    except checker.ValidationError as error:
        raise ValueError(f"{who}: the model is wrong: {sentence(error)}") from None


def sentence(error: Exception) -> str:
    """What onnx says, in one line, without where in the file."""
    text = str(error).partition("==> Context:")[0]
    return " ".join(text.split()) or type(error).__name__


def _without_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with inputs in the places of large initializers."""
    graph = model.graph
    small = [each for each in graph.initializer if size_of(each) <= LARGE]
    large = [each for each in graph.initializer if size_of(each) > LARGE]
    given = {each.name for each in graph.input}
    inputs = [
        helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in large if each.name not in given
    ]
    copy = onnx.GraphProto(name=graph.name or "graph", node=graph.node, initializer=small)
    copy.input.extend([*graph.input, *inputs])
    copy.output.extend(graph.output)
    for value in (*copy.input, *copy.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # onnx takes none without, onnxruntime does
    copy.sparse_initializer.extend(graph.sparse_initializer)
    result = onnx.ModelProto(ir_version=model.ir_version, graph=copy, opset_import=model.opset_import)
    result.functions.extend(model.functions)
    return result


def near(name: str, names: Iterable[str]) -> str:
    """What to say of names that are like one that there is not."""
    found = difflib.get_close_matches(name, list(names), 3)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def listed(names: Collection[str], most: int = 8) -> str:
    """Names for a message: not more than these, and how many there are beyond."""
    shown = ", ".join(map(repr, list(names)[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"

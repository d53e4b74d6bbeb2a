"""Checks of a model, whose messages are one sentence."""

import difflib
from collections.abc import Collection, Iterable

import onnx
from onnx import TensorProto, checker, helper

from opgrad.onnx.graph.conversion import UNKNOWN
from opgrad.onnx.graph.messages import HALVES, domain_of, without_large
from opgrad.onnx.graph.nodes import all_nodes, is_known


def check_built(model: onnx.ModelProto, what: str = "the model") -> None:
    """Raise ValueError if a graph does not hold together: names that nothing makes, or that are made twice.

    what: the model's name, for messages.
    """
    try:
        checker.check_model(without_values(model))
    except checker.ValidationError as error:
        text = str(error).partition("==> Context:")[0]  # behind it stands the place in onnx's source
        raise ValueError(f"{what} is wrong: {' '.join(text.split())}") from None


def refused_inputs(graph: onnx.GraphProto) -> str | None:
    """A message that an input of a graph has text, which no array of a batch holds; None if none has."""
    texts = [each.name for each in graph.input if each.type.tensor_type.elem_type == TensorProto.STRING]
    return (
        f"the input {texts[0]!r} is text, expected numbers: turn texts into numbers before the model" if texts else None
    )


def refused_types(kinds: Iterable[int]) -> str | None:
    """A message that opgrad trains no parameters of some of these element types; None if it trains all of them."""
    others = sorted({TensorProto.DataType.Name(kind).lower() for kind in set(kinds) - {TensorProto.FLOAT, *HALVES}})
    if not others:
        return None
    return (
        f"parameters in {' and '.join(others)} are not trained here: Trainer, Module and `opgrad train` take float32, "
        "float16 and bfloat16; convert the model to float32 first"
    )


def without_values(model: onnx.ModelProto, unknown: bool = True) -> onnx.ModelProto:
    """A model with inputs in the places of large initializers.

    unknown: whether operators that onnx does not know are moved to a domain that its checker ignores.
    """
    copy = without_large(model.graph)
    copy.name = copy.name or "graph"
    del copy.value_info[:]
    for value in (*copy.input, *copy.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # onnx's checker demands a shape, onnxruntime does not
    imports = {each.domain or "ai.onnx": each.version for each in model.opset_import}
    for node in all_nodes(copy.node):
        if unknown and domain_of(node) == "" and not is_known(node.op_type, imports.get("ai.onnx", 1)):
            node.domain = UNKNOWN
    result = onnx.ModelProto(ir_version=model.ir_version, graph=copy, opset_import=model.opset_import)
    domains = {node.domain for node in all_nodes(copy.node)} - imports.keys() - {"", "ai.onnx"}
    result.opset_import.extend(helper.make_opsetid(domain, 1) for domain in sorted(domains))
    result.functions.extend(model.functions)
    return result


def near(name: str, names: Iterable[str]) -> str:
    """The part of a message that suggests names similar to one that does not exist."""
    found = difflib.get_close_matches(name, list(names), 3)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def quantity(number: int, what: str) -> str:
    """A number of things for a message: 1 node, 2 nodes."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(names: Collection[str], most: int = 8) -> str:
    """Names for a message: at most `most` of them, and the number of the others."""
    shown = ", ".join(map(repr, list(names)[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"

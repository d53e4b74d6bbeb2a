"""Reads ONNX models from untrusted files and bytes.

Every fault raises a ValueError of one line with the file's name.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, TypeProto
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor, uses_external_data

from opgrad.base.reading import check_regular, read_regular
from opgrad.base.writing import finish_interrupted
from opgrad.onnx.graph.batch_norm import one_output
from opgrad.onnx.graph.declarations import faults_of_nodes
from opgrad.onnx.graph.hoisting import hoist
from opgrad.onnx.graph.large import size_of
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.graph.nodes import all_nodes
from opgrad.onnx.graph.opset import align_functions
from opgrad.onnx.graph.repair import make_dense, mend, time_first

MOST_OPSET = 1 << 31  # what onnx's own functions take
MOST_CALLS, MOST_NODES = 100, 1 << 20  # the depth of calls of functions, which onnx limits too, and nodes in all
# The bytes of an element, of types that have some, and the fields that hold values beside raw_data.
WIDTHS = {2: 1, 3: 1, 9: 1, 4: 2, 5: 2, 10: 2, 16: 2, 1: 4, 6: 4, 12: 4, 7: 8, 11: 8, 13: 8, 14: 8, 15: 16}
COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
LISTS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
AXES, MOST_AXES = ("axis", "axes"), 1024  # attributes, and a limit far beyond what any runtime has
ELEMENT_TYPES = frozenset(TensorProto.DataType.values())

Source: TypeAlias = str | bytes | PathLike[str]
Model: TypeAlias = onnx.ModelProto | Source


def load(model: Model, who: str, outside: bool = True) -> onnx.ModelProto:
    """A checked model that may be changed: a copy of the given one, or the content of a file or of bytes.

    who: the caller, for messages. outside: whether tensors that a file keeps in other files are read, too.
    Raises TypeError for anything else, and what `read_model` raises.
    """
    if isinstance(model, onnx.ModelProto):
        copy = copied(model)
        check_and_repair(copy, f"{who}: the model")
        return copy
    if not isinstance(model, bytes | str | os.PathLike):
        raise TypeError(f"{who}: model is of type {type(model).__name__}, expected onnx.ModelProto, bytes or a path")
    return read_model(model, who, outside)


def check_and_repair(model: onnx.ModelProto, what: str) -> None:
    """Raise ValueError for a damaged model, and correct in place what only one of ONNX and onnxruntime accepts.

    what: the caller and the model's name, for messages.
    """
    check_model(model, what)
    _repair(model, what)


def _repair(model: onnx.ModelProto, what: str) -> None:
    make_dense(model, what)
    mend(model)
    align_functions(model, what)
    one_output(model)
    time_first(model)
    hoist(model)


def read_model(source: Source, who: str, outside: bool = True) -> onnx.ModelProto:
    """An ONNX model from a file or from its bytes.

    who: the caller, for messages.
    outside: whether tensors that the file keeps in other files are read, too.
    Raises FileNotFoundError if there is no such file, ValueError if it is no ONNX model, or damaged, or empty.
    """
    name = name_of(source)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(source if isinstance(source, bytes) else _content(Path(source), who))
    except (DecodeError, UnicodeDecodeError):
        raise ValueError(f"{who}: {name} is no ONNX model, or damaged") from None
    check_model(model, f"{who}: {name}")
    for value in model.graph.input:
        kind = value.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not value.type.tensor_type.elem_type):
            raise ValueError(f"{who}: {name} is damaged, the input {value.name!r} has no type")
    if not model.graph.node and not model.graph.output:
        raise ValueError(f"{who}: {name} is no ONNX model, or empty")
    _repair(model, f"{who}: {name}")
    if outside and not isinstance(source, bytes):
        read_outside(model, Path(source), who)
    return model


def check_model(model: onnx.ModelProto, what: str) -> None:
    """Raise ValueError for a text that is not UTF-8, an unknown type, or a node that ONNX declares otherwise.

    what: the caller and the model's name, for messages.
    """
    faults = chain(map(_fault, _messages(model)), faults_of_nodes(model.graph, model.opset_import))
    inside = chain.from_iterable(faults_of_nodes(each, each.opset_import) for each in model.functions)
    fault = next(filter(None, chain(_faults_of_imports(model), faults, _faults_of_calls(model), inside)), None)
    if fault:
        raise ValueError(f"{what} is damaged, {fault}")


def _faults_of_imports(model: onnx.ModelProto) -> Iterator[str]:
    imports = chain(model.opset_import, *(each.opset_import for each in model.functions))
    return (f"it imports opset {each.version}" for each in imports if not 0 <= each.version < MOST_OPSET)


def _faults_of_calls(model: onnx.ModelProto) -> Iterator[str]:
    """What is wrong with functions that call functions, of which onnx's inference and inliner follow every call."""
    functions = {(each.domain, each.name): each for each in model.functions}
    called = {key: [each for each in map(_key, all_nodes(function.node)) if each in functions]
              for key, function in functions.items()}  # fmt: skip
    nodes, depths = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
    try:
        order = tuple(TopologicalSorter(called).static_order())
    except CycleError as error:
        yield f"the function {':'.join(error.args[1][0])!r} calls itself"
        return
    for key in order:
        nodes[key] = sum(1 for _ in all_nodes(functions[key].node)) + sum(nodes[each] for each in called[key])
        depths[key] = 1 + max((depths[each] for each in called[key]), default=0)
    if max(depths.values(), default=0) > MOST_CALLS:
        yield f"functions call functions {max(depths.values())} deep, expected at most {MOST_CALLS}"
    count = sum(nodes.get(_key(node), 0) for node in all_nodes(model.graph.node))
    if count > MOST_NODES:
        yield f"its functions have {count} nodes with all their calls, expected at most {MOST_NODES}"


def _key(node: onnx.NodeProto) -> tuple[str, str]:
    return node.domain, node.op_type


def name_of(source: Source) -> str:
    """The name of a model in messages."""
    return "the model" if isinstance(source, bytes) else os.fspath(source)


def _content(path: Path, who: str) -> bytes:
    if not path.exists() and not (finish_interrupted(path.parent) and path.exists()):
        raise FileNotFoundError(f"{who}: there is no file {path}")
    return read_regular(path, f"{who}: {path}")


# --- what is wrong with a message ------------------------------------------------------------------------------------


def _messages(message: Any) -> Iterator[Any]:
    """A message and all messages inside it, except those inside tensors, whose values may be large."""
    yield message
    if isinstance(message, TensorProto):
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for each in (value,) if hasattr(value, "ListFields") else value:
                yield from _messages(each)


def _fault(message: Any) -> str | None:
    """The fault of a message itself, not of messages inside it; None if there is none."""
    if isinstance(message, TensorProto):
        return _fault_of_tensor(message)
    if isinstance(message, TypeProto.Tensor) and message.elem_type not in ELEMENT_TYPES:
        return f"a tensor has the unknown element type {message.elem_type}"
    if isinstance(message, AttributeProto) and not message.type and not message.ref_attr_name:
        return f"the attribute {message.name!r} has no type"
    axes = (message.i, *message.ints) if isinstance(message, AttributeProto) and message.name in AXES else ()
    if strange := [each for each in axes if abs(each) > MOST_AXES]:
        return f"the attribute {message.name!r} is {strange[0]}, expected an axis"
    for field, value in message.ListFields():
        # protobuf returns a text that is not UTF-8 as bytes.
        if field.type == field.TYPE_STRING and any(
            isinstance(each, bytes) for each in ((value,) if isinstance(value, str | bytes) else value)
        ):
            return f"{field.name} is no text in UTF-8"
    return None


def _fault_of_tensor(tensor: TensorProto) -> str | None:
    texts = (tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value)))
    if any(isinstance(text, bytes) for text in texts):
        return "the name of a tensor is no text in UTF-8"
    if tensor.data_type not in ELEMENT_TYPES or tensor.data_type == TensorProto.UNDEFINED:
        return f"the tensor {tensor.name!r} has the unknown element type {tensor.data_type}"
    if min(tensor.dims, default=0) < 0:
        return f"the tensor {tensor.name!r} has shape {tuple(tensor.dims)}"
    return None if uses_external_data(tensor) else _fault_of_values(tensor)


def _fault_of_values(tensor: TensorProto) -> str | None:
    """What is wrong with the number of values of a tensor that has them in itself."""
    count, raw, width = size_of(tensor), tensor.HasField("raw_data"), WIDTHS.get(tensor.data_type)
    lists = [len(getattr(tensor, name)) for name in LISTS]
    if count and not raw and not any(lists):
        return f"the tensor {tensor.name!r} has no values, expected {count}"
    if width is None:  # several elements in a byte, or text
        return None
    found = len(tensor.raw_data) / width if raw else sum(lists) / (2 if tensor.data_type in COMPLEX else 1)
    return None if found == count else f"the tensor {tensor.name!r} has {found:g} values, expected {count}"


# --- tensors in other files ------------------------------------------------------------------------------------------


def read_outside(
    model: onnx.ModelProto, path: Path, who: str, left: Callable[[TensorProto], bool] = lambda tensor: False
) -> None:
    """Read the tensors that a model keeps in other files.

    path: the file of the model. who: the caller, for messages. left: tells which of them stay outside.
    """
    tensors = [tensor for tensor in _messages(model) if isinstance(tensor, TensorProto) and uses_external_data(tensor)]
    with naming_outside(path, who):
        for tensor in tensors:
            if left(tensor):
                continue
            place_of(tensor, path.parent)
            load_external_data_for_tensor(tensor, str(path.parent))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]


@contextmanager
def naming_outside(path: Path, who: str) -> Iterator[None]:
    """Within the `with` block, turn errors of reading another file into ones that name the model."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{who}: {path} keeps tensors in another file: {error}") from None
    except Exception as error:  # onnx's checker has its own class of exceptions
        raise ValueError(f"{who}: {path} keeps tensors in another file: {' '.join(str(error).split())}") from None


def place_of(tensor: TensorProto, folder: Path) -> ExternalDataInfo:
    """The place of a tensor's values.

    Raises ValueError if the file is outside of the folder or reached by a link, or has fewer bytes than the model says.
    """
    place = ExternalDataInfo(tensor)
    named = Path(place.location)
    if not named.parts or named.is_absolute() or ".." in named.parts:
        raise ValueError(f"{place.location!r} is no file in the model's folder")
    if links := [each for each in (named, *named.parents) if (folder / each).is_symlink() and each.parts]:
        raise ValueError(f"{place.location!r} leads through the link {str(links[-1])!r}, expected none")
    check_regular(folder / place.location, place.location)
    available = (folder / place.location).stat().st_size
    end = (place.offset or 0) + (place.length or 0)
    if end > available:
        raise ValueError(f"{place.location} has {available} bytes, expected at least {end}")
    return place

"""Reads ONNX models from untrusted files and bytes.

Every fault raises a ValueError of one line with the file's name.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor, uses_external_data

from opgrad.base.files import check_regular, finish_interrupted, read_regular
from opgrad.base.limits import free_memory
from opgrad.onnx.graph.conversion import align_functions, one_output
from opgrad.onnx.graph.graph import AMPLIFIED, Graph, overridable
from opgrad.onnx.graph.messages import copied, domain_of, free_name, keep, size_of
from opgrad.onnx.graph.nodes import (
    all_nodes,
    captured,
    faults_of_nodes,
    model_nodes,
    names_in,
    sorted_nodes,
    subgraphs,
    title,
)
from opgrad.onnx.graph.subgraphs import hoist

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


def load(model: Model, outside: bool = True) -> onnx.ModelProto:
    """A checked model that may be changed: a copy of the given one, or the content of a file or of bytes.

    outside: whether tensors that a file keeps in other files are read, too.
    Raises TypeError for anything else, and what `read_model` raises.
    """
    if isinstance(model, onnx.ModelProto):
        copy = copied(model)
        check_and_repair(copy, "the model")
        return copy
    if not isinstance(model, bytes | str | os.PathLike):
        raise TypeError(f"model is of type {type(model).__name__}, expected onnx.ModelProto, bytes or a path")
    return read_model(model, outside)


def check_and_repair(model: onnx.ModelProto, what: str) -> None:
    """Raise ValueError for a damaged model, and correct in place what only one of ONNX and onnxruntime accepts.

    what: the model's name, for messages.
    """
    check_model(model, what)
    _repair(model, what)


def _repair(model: onnx.ModelProto, what: str) -> None:
    for sparse in model.graph.sparse_initializer:
        model.graph.initializer.append(_dense(sparse, f"{what}: the sparse initializer {sparse.values.name!r}"))
    del model.graph.sparse_initializer[:]
    for node in model_nodes(model):
        for each in node.attribute if node.op_type == "Constant" else ():
            if each.name == "sparse_value":
                dense = _dense(each.sparse_tensor, f"{what}: the sparse value of {node.output[0]!r}")
                each.CopyFrom(helper.make_attribute("value", dense))
    mend(model)
    align_functions(model, what)
    one_output(model)
    rewrite(model)
    hoist(model)


def read_model(source: Source, outside: bool = True) -> onnx.ModelProto:
    """An ONNX model from a file or from its bytes.

    outside: whether tensors that the file keeps in other files are read, too.
    Raises FileNotFoundError if there is no such file, ValueError if it is no ONNX model, or damaged, or empty.
    """
    name = name_of(source)
    model = onnx.ModelProto()
    try:
        if not isinstance(source, bytes):
            path = Path(source)
            if not path.exists() and not (finish_interrupted(path.parent) and path.exists()):
                raise FileNotFoundError(f"there is no file {path}")
            content = read_regular(path, str(path))
        model.ParseFromString(source if isinstance(source, bytes) else content)
    except (DecodeError, UnicodeDecodeError):
        raise ValueError(f"{name} is no ONNX model, or damaged") from None
    check_model(model, name)
    for value in model.graph.input:
        kind = value.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not value.type.tensor_type.elem_type):
            raise ValueError(f"{name} is damaged, the input {value.name!r} has no type")
    if not model.graph.node and not model.graph.output:
        raise ValueError(f"{name} is no ONNX model, or empty")
    _repair(model, name)
    if outside and not isinstance(source, bytes):
        read_outside(model, Path(source))
    return model


def check_model(model: onnx.ModelProto, what: str) -> None:
    """Raise ValueError for a text that is not UTF-8, an unknown type, or a node that ONNX declares otherwise.

    what: the model's name, for messages.
    """
    imports = chain(model.opset_import, *(each.opset_import for each in model.functions))
    of_imports = (f"it imports opset {each.version}" for each in imports if not 0 <= each.version < MOST_OPSET)
    faults = chain(map(_fault, _messages(model)), faults_of_nodes(model.graph, model.opset_import))
    inside = chain.from_iterable(faults_of_nodes(each, each.opset_import) for each in model.functions)
    of_calls = _faults_of_calls(model) if model.functions else ()
    fault = next(filter(None, chain(of_imports, faults, of_calls, inside, _twice(model.graph))), None)
    if fault:
        raise ValueError(f"{what} is damaged, {fault}")


def _twice(graph: onnx.GraphProto) -> Iterator[str]:
    """The names that several values of a graph have; an initializer may be the default of an input."""
    tensors = [each.name for each in graph.initializer]
    inputs = {each.name for each in graph.input} - {*tensors}
    names = Counter([*tensors, *inputs, *(name for node in graph.node for name in node.output if name)])
    yield from (f"{count} values have the name {name!r}, expected one" for name, count in names.items() if count > 1)


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
    if uses_external_data(tensor):
        return None
    count, raw, width = size_of(tensor), tensor.HasField("raw_data"), WIDTHS.get(tensor.data_type)
    lists = [len(getattr(tensor, name)) for name in LISTS]
    if count and not raw and not any(lists):
        return f"the tensor {tensor.name!r} has no values, expected {count}"
    if width is None:  # several elements in a byte, or text
        return None
    found = len(tensor.raw_data) / width if raw else sum(lists) / (2 if tensor.data_type in COMPLEX else 1)
    return None if found == count else f"the tensor {tensor.name!r} has {found:g} values, expected {count}"


def read_outside(
    model: onnx.ModelProto, path: Path, left: Callable[[TensorProto], bool] = lambda tensor: False
) -> None:
    """Read the tensors that a model keeps in other files.

    path: the file of the model. left: tells which of them stay outside.
    """
    tensors = [tensor for tensor in _messages(model) if isinstance(tensor, TensorProto) and uses_external_data(tensor)]
    with naming_outside(path):
        for tensor in tensors:
            if left(tensor):
                continue
            place_of(tensor, path.parent)
            load_external_data_for_tensor(tensor, str(path.parent))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]


@contextmanager
def naming_outside(path: Path) -> Iterator[None]:
    """Within the `with` block, turn errors of reading another file into ones that name the model."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} keeps tensors in another file: {error}") from None
    except Exception as error:  # onnx's checker has its own class of exceptions
        raise ValueError(f"{path} keeps tensors in another file: {' '.join(str(error).split())}") from None


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


def mend(model: onnx.ModelProto) -> None:
    """Sort the nodes topologically, turn sizes below 0 into unknown ones, complete calls of functions, and let Loops
    count by scalars, in place."""
    # Write default values of functions' attributes into the calls, as onnx's inliner knows none.
    defaults = {(each.domain, each.name, each.overload): each.attribute_proto for each in model.functions}
    for node in model_nodes(model) if any(defaults.values()) else ():
        given = {each.name for each in node.attribute}
        found = defaults.get((domain_of(node), node.op_type, node.overload), ())
        node.attribute.extend(each for each in found if each.name not in given)
    # A Loop's body gets its iteration as a scalar, of which it makes the shape that it declares: onnx infers a scalar
    # whatever is declared, and onnxruntime gives what is declared, [1] of torch's older exporter.
    taken = set[str]()
    for body in [body for node in model_nodes(model) if node.op_type == "Loop" for body in subgraphs(node)]:
        counter = next(iter(body.input), None)
        if counter is None or not counter.type.tensor_type.shape.dim:
            continue
        taken = taken or names_in(model.graph)
        shape = free_name(f"{counter.name}_shape", taken)
        name, counter.name = counter.name, free_name(f"{counter.name}_scalar", taken)
        del counter.type.tensor_type.shape.dim[:]
        body.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [1], [1]))
        body.node.insert(0, helper.make_node("Reshape", [counter.name, shape], [name]))
    for graph in chain([model.graph], (each for node in all_nodes(model.graph.node) for each in subgraphs(node))):
        nodes, ordered = list(graph.node), sorted_nodes(graph.node)
        if len(ordered) == len(nodes) and any(a is not b for a, b in zip(ordered, nodes, strict=True)):
            keep(graph.node, ordered)
        for value in (*graph.input, *graph.output, *graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_value < 0:
                    size.Clear()


MOST = 2**31  # bytes of a dense one, the most that a model's file holds


def _dense(sparse: onnx.SparseTensorProto, what: str) -> onnx.TensorProto:
    """The dense form of a sparse initializer. Raises ValueError for one that is damaged or too large."""
    for name, tensor in (("values", sparse.values), ("indices", sparse.indices)):
        if uses_external_data(tensor):
            raise ValueError(f"{what} has its {name} in another file, expected in the model")
    dims = tuple(sparse.dims)
    try:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is damaged: {error}") from None
    fits = indices.dtype == np.int64 and values.ndim == 1 and all(size >= 0 for size in dims)
    if not fits or indices.shape not in ((len(values),), (len(values), len(dims))):
        raise ValueError(
            f"{what} has values {list(values.shape)} and {indices.dtype} indices {list(indices.shape)} for the shape "
            f"{list(dims)}, expected an int64 index, or one for each axis, of each value"
        )
    if math.prod(dims) * values.itemsize > MOST:
        raise ValueError(f"{what} has the shape {list(dims)}, expected at most {MOST:,} bytes")
    bounds = np.array(dims if indices.ndim == 2 else (math.prod(dims),), np.int64)
    if np.any(indices < 0) or np.any(indices >= bounds):
        raise ValueError(f"{what} has an index outside of its shape {list(dims)}")
    array = np.zeros(dims, values.dtype)
    if indices.ndim == 2:
        array[tuple(indices.T)] = values
    else:
        array.reshape(-1)[indices] = values
    return numpy_helper.from_array(array, sparse.values.name)


LAYERS = ("RNN", "GRU", "LSTM")
X, STATES = 0, (5, 6)  # the places of inputs with a batch: x, and the initial states and cells
SWAPPED = [1, 0, 2]  # of x, of initial and of last states: the first two axes change places
BATCH_FIRST = [2, 0, 1, 3]  # all states, from [time, directions, batch, size] to [batch, time, directions, size]


def rewrite(model: onnx.ModelProto) -> None:
    """Replace each layer with `layout` 1 by one with `layout` 0 between transpositions, and Erfc by 1 - Erf, in place.

    ONNX has no Erfc, of TensorFlow, which tf2onnx leaves as it is.
    """
    if not any(map(_is_rewritten, model_nodes(model))):
        return
    taken = names_in(model.graph).union(*(set(node.input) | set(node.output) for node in model_nodes(model)))
    lists: list[Any] = []  # of nodes, outer ones first
    for owner in (model.graph, *model.functions):
        lists.append(owner.node)
        lists += [graph.node for node in all_nodes(owner.node) for graph in subgraphs(node)]
    for nodes in reversed(lists):
        if any(map(_is_rewritten, nodes)):
            keep(nodes, [new for node in nodes for new in (_written(node, taken) if _is_rewritten(node) else [node])])


def _is_rewritten(node: onnx.NodeProto) -> bool:
    is_layer = node.op_type in LAYERS and any(each.name == "layout" and each.i for each in node.attribute)
    return not domain_of(node) and (is_layer or node.op_type == "Erfc")


def _written(node: onnx.NodeProto, taken: set[str]) -> list[onnx.NodeProto]:
    """The layer between transpositions of what it reads and of what it returns, or the nodes of an Erfc."""
    if node.op_type == "Erfc":
        one, erf = (free_name(f"{node.output[0]}_{name}", taken) for name in ("one", "erf"))
        nodes = [helper.make_node("Constant", [], [one], value_float=1.0), helper.make_node("Erf", node.input, [erf])]
        return [*nodes, helper.make_node("Sub", [one, erf], node.output, node.name)]
    before, behind = [], []
    layer = onnx.NodeProto()
    layer.CopyFrom(node)
    keep(layer.attribute, [each for each in node.attribute if each.name != "layout"])
    for place, name in enumerate(node.input):
        if name and (place == X or place in STATES):
            layer.input[place] = free_name(f"{name}_time_first", taken)
            before.append(helper.make_node("Transpose", [name], [layer.input[place]], perm=SWAPPED))
    for place, name in enumerate(node.output):
        if name:
            layer.output[place] = free_name(f"{name}_time_first", taken)
            order = SWAPPED if place else BATCH_FIRST
            behind.append(helper.make_node("Transpose", [layer.output[place]], [name], perm=order))
    return [*before, layer, *behind]


LARGEST = 1 << 30  # the most bytes of a value that follows from constants, beside AMPLIFIED times what these have


def check_sizes(model: onnx.ModelProto, what: str = "the model") -> bool:
    """Raise ValueError, naming the node, for a value for which there is no memory, or not as much for constants.

    Returns whether there is for all constants together, which a runtime may compute ahead and keep; those inside of
    graphs of nodes and of functions have no known sizes. what: the model's name, for messages.
    """
    graph = Graph(model)
    try:
        graph.sizes("")
    except ValueError:  # its types contradict each other; whatever runs the model reports an error
        return False

    def width(dtype: int) -> int:
        return np.dtype(helper.tensor_dtype_to_np_dtype(dtype)).itemsize if dtype else 1

    held = sum(size_of(each) * width(each.data_type) for each in model.graph.initializer)
    held += sum(each.ByteSize() for each in graph.nodes() if each.op_type == "Constant")
    constants = set(graph.initializers) - overridable(model)
    called = {(each.domain, each.name) for each in model.functions}
    most, free = LARGEST + AMPLIFIED * held, free_memory() or math.inf
    room: float = most
    if any(_has_constants(each.node, set()) for each in model.functions):
        room = -math.inf
    for node in graph.nodes():
        fixed = constants.issuperset(captured(node))
        if (fixed and (node.domain, node.op_type) in called) or _has_constants_inside(node, constants):
            room = -math.inf
        for name in filter(None, node.output if node.op_type != "Constant" else ()):
            sizes, limit = graph.sizes(name), most if fixed else free
            numbers = [size for size in sizes or () if isinstance(size, int)]
            size = math.prod(numbers) * width(graph.element_type(name) or 0)  # at least so many bytes
            if sizes is not None and size > limit:
                of = " from constants" if fixed else ""
                raise ValueError(f"{what}: {title(node)} computes {size} bytes{of}, expected at most {int(limit)}")
            if fixed:
                room -= size if sizes is not None and len(numbers) == len(sizes) else math.inf
        constants.update(node.output if fixed else ())
    return room >= 0


def _has_constants(nodes: Iterable[onnx.NodeProto], constants: set[str]) -> bool:
    """Whether nodes compute something from constants alone. constants: those around them."""
    known = set(constants)
    for node in nodes:
        if node.op_type == "Constant":
            known.update(node.output)
        elif known.issuperset(captured(node)) or _has_constants_inside(node, known):
            return True
    return False


def _has_constants_inside(node: onnx.NodeProto, constants: set[str]) -> bool:
    return any(_has_constants(each.node, constants | {x.name for x in each.initializer}) for each in subgraphs(node))

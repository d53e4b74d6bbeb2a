"""Corrects what only one of ONNX, its inliner and onnxruntime understands."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.messages import domain_of, free_name, keep
from opgrad.onnx.graph.nodes import all_nodes, captured, model_nodes, names_in, subgraphs


def mend(model: onnx.ModelProto) -> None:
    """Sort the nodes topologically, turn sizes below 0 into unknown ones, complete calls of functions, and let Loops
    count by scalars, in place."""
    # Write default values of functions' attributes into the calls, as onnx's inliner knows none.
    defaults = {(each.domain, each.name, each.overload): each.attribute_proto for each in model.functions}
    for node in model_nodes(model) if any(defaults.values()) else ():
        given = {each.name for each in node.attribute}
        found = defaults.get((domain_of(node), node.op_type, node.overload), ())
        node.attribute.extend(each for each in found if each.name not in given)
    _count_by_scalars(model)
    for graph in _graphs(model.graph):
        _sort(graph)
        for value in (*graph.input, *graph.output, *graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_value < 0:
                    size.Clear()


def _count_by_scalars(model: onnx.ModelProto) -> None:
    """Let a Loop's body get its iteration as a scalar, of which it makes the shape that it declares.

    onnx infers a scalar whatever is declared, and onnxruntime gives what is declared, [1] of torch's older exporter.
    """
    taken = set[str]()
    for loop in (node for node in model_nodes(model) if node.op_type == "Loop"):
        for body in subgraphs(loop):
            counter = next(iter(body.input), None)
            if counter is None or not counter.type.tensor_type.shape.dim:
                continue
            taken = taken or names_in(model.graph)
            shape = free_name(f"{counter.name}_shape", taken)
            name, counter.name = counter.name, free_name(f"{counter.name}_scalar", taken)
            del counter.type.tensor_type.shape.dim[:]
            body.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [1], [1]))
            body.node.insert(0, helper.make_node("Reshape", [counter.name, shape], [name]))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in all_nodes(graph.node):
        yield from subgraphs(node)


def _sort(graph: onnx.GraphProto) -> None:
    """Sort the nodes topologically; if they form a circle, leave the order as it is."""
    made = {name for node in graph.node for name in node.output if name}
    waiting: list[tuple[onnx.NodeProto, set[str]]] = [(node, made.intersection(captured(node))) for node in graph.node]
    known = set[str]()
    ordered: list[Any] = []
    in_order = True
    while waiting:
        later = []
        for node, needed in waiting:
            if needed <= known:
                ordered.append(node)
                known.update(node.output)
            else:
                later.append((node, needed))
                in_order = False
        if len(later) == len(waiting):
            return
        waiting = later
    if not in_order:
        keep(graph.node, ordered)


# --- sparse initializers ----------------------------------------------------------------------------------------------


MOST = 2**31  # bytes of a dense one, the most that a model's file holds


def make_dense(model: onnx.ModelProto, what: str) -> None:
    """Replace the sparse initializers of a model by dense ones, in place.

    what: the caller and the model's name, for messages. Raises ValueError for one that is damaged or too large.
    """
    for sparse in model.graph.sparse_initializer:
        model.graph.initializer.append(_dense(sparse, f"{what}: the sparse initializer {sparse.values.name!r}"))
    del model.graph.sparse_initializer[:]


def _dense(sparse: onnx.SparseTensorProto, what: str) -> onnx.TensorProto:
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


# --- recurrent layers whose batch comes first -------------------------------------------------------------------------


LAYERS = ("RNN", "GRU", "LSTM")
X, STATES = 0, (5, 6)  # the places of inputs with a batch: x, and the initial states and cells
SWAPPED = [1, 0, 2]  # of x, of initial and of last states: the first two axes change places
BATCH_FIRST = [2, 0, 1, 3]  # all states, from [time, directions, batch, size] to [batch, time, directions, size]


def time_first(model: onnx.ModelProto) -> None:
    """Replace each layer with `layout` 1 by one with `layout` 0 between transpositions, in place."""
    if not any(map(_is_batch_first, model_nodes(model))):
        return
    taken = names_in(model.graph).union(*(set(node.input) | set(node.output) for node in model_nodes(model)))
    for nodes in reversed(list(_lists(model))):
        if any(map(_is_batch_first, nodes)):
            keep(nodes, [new for node in nodes for new in (_written(node, taken) if _is_batch_first(node) else [node])])


def _lists(model: onnx.ModelProto) -> Iterator[Any]:
    """The repeated fields with the nodes of a model, of its functions and of all subgraphs, outer ones first."""
    for owner in (model.graph, *model.functions):
        yield owner.node
        for node in all_nodes(owner.node):
            yield from (graph.node for graph in subgraphs(node))


def _is_batch_first(node: onnx.NodeProto) -> bool:
    if node.op_type not in LAYERS or domain_of(node):
        return False
    return any(each.name == "layout" and each.i for each in node.attribute)


def _written(node: onnx.NodeProto, taken: set[str]) -> list[onnx.NodeProto]:
    """The layer between transpositions of what it reads and of what it returns."""
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

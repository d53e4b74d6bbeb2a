"""`gradients`: it makes a model that also computes gradients."""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError, ArgumentTypeError, naming
from opgrad.onnx import passes
from opgrad.onnx.gradients.backward import SUFFIX, Backward
from opgrad.onnx.gradients.expansion import expand, inline_functions
from opgrad.onnx.graph.conversion import raise_opset
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.loading import load
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT, import_microsoft
from opgrad.onnx.graph.nodes import all_nodes
from opgrad.onnx.passes.attention import Recognition, fuse_attention
from opgrad.onnx.passes.recompute import SEGMENTS, checkpoint, order_ends

LEAST_OPSET = 11  # the least opset of a model with gradients
PLAIN_OPSET = 16  # the least opset of the plain form
UPDATING = "BatchNormInternal"  # batch normalization that writes new statistics over those that it is given


@naming("gradients")
def gradients(
    model: onnx.ModelProto | bytes | str | os.PathLike[str], of: str | Sequence[str],
    with_respect_to: str | Sequence[str], *,
    plain: bool = False, checkpoint_segments: int | Sequence[str] | None = None,
) -> onnx.ModelProto:  # fmt: skip
    """The same model with gradients among its outputs.

    model: an onnx.ModelProto, which is not changed, the bytes of one, or the path of a file.
    of: the value that is differentiated, or several, of which the sum is: outputs of the model or any other values of
        its graph, of float type. Of one that is no scalar the sum of all elements is differentiated.
    with_respect_to: inputs, initializers or other values of the graph, of float type.
    plain: write operators of ONNX alone, for places without opgrad. Otherwise the model also has operators of
        com.microsoft, which sessions of `opgrad.onnxruntime.InferenceSession` run, faster.
    checkpoint_segments: how many segments the graph is cut into, or the names of values at whose nodes one ends: less
        memory for more time, as what is inside of all but the last is forgotten and computed again.

    Returns the new model: behind the outputs of the given one it has `<name>_grad` for each of with_respect_to, in
    their order, of the shape and type of that value. Its opset is the given one, but at least 11, and at least 16 in
    the plain form.

    Raises TypeError and ValueError for other arguments, for names that the graph does not have, and where a value
    does not depend on another; FileNotFoundError; NotImplementedError, which names all nodes that have no gradient
    and says why.
    """
    return with_gradients(model, of, with_respect_to, plain, checkpoint_segments, in_tiles=not plain)


def with_gradients(
    model: onnx.ModelProto | bytes | str | os.PathLike[str], of: str | Sequence[str],
    with_respect_to: str | Sequence[str], plain: bool, checkpoint_segments: int | Sequence[str] | None, in_tiles: bool,
) -> onnx.ModelProto:  # fmt: skip
    """`gradients`. in_tiles: whether attention is recognized, so that its matrices of scores are computed in tiles."""
    sources, targets = _names("of", of), _names("with_respect_to", with_respect_to)
    ends = names_in(checkpoint_segments)
    model = load(model)
    given = {name for node in all_nodes(model.graph.node) if node.op_type == UPDATING for name in node.output}
    forward = prepared(_simplified(model, [*sources, *ends], targets, plain), sources, targets, in_tiles)
    before = (*sources, *(each.name for each in forward.graph.output))
    body = GraphBody(forward.opset, forward.names(), plain)
    found = differentiate(forward, body, {name: _seed(forward, body, name) for name in sources}, targets)
    outputs: dict[str, onnx.ValueInfoProto] = {}
    for name, value in found.items():
        wanted = name + SUFFIX
        if value.name != wanted:
            wanted = body.free(wanted)
            body.nodes.append(helper.make_node("Identity", [value.name], [wanted], f"{wanted}/Identity"))
        body.infos.pop(wanted, None)
        dtype = forward.element_type(name) or value.element_type or TensorProto.FLOAT
        outputs[name] = helper.make_tensor_value_info(wanted, dtype, forward.sizes(name))
    append(forward, body, list(outputs.values()))
    graph = forward.again(overridable(model).union(targets), {*targets, *before, *ends})
    passes.tidy(graph)
    gradients_of = {name: each.name for name, each in outputs.items()}
    finished = Differentiated(graph, before, gradients_of).model(checkpoint_segments)
    # In a training graph the running statistics are inputs that the caller keeps and each run updates. Here they are
    # constants or the caller's arrays, which a run must not change: but for nodes that the model had already.
    for node in all_nodes(finished.graph.node):
        if node.op_type == UPDATING and node.domain == MICROSOFT and given.isdisjoint(node.output):
            node.op_type = "BatchNormTraining"
    if not plain:
        return finished
    from opgrad.onnx.plain.lowering import lower

    return lower(finished)


def outlook(
    model: onnx.ModelProto, of: Sequence[str], with_respect_to: Sequence[str]
) -> tuple[list[str], list[Recognition]]:
    """Why `gradients` of these values would fail, and what it makes of each softmax that stands before a product.

    The reasons have a line for each node that has no gradient.
    """
    simple = _simplified(load(model), of, with_respect_to)
    forward, found = with_attention(prepared(simple, of, with_respect_to, in_tiles=False), of, with_respect_to)
    body = GraphBody(forward.opset, forward.names())
    backward = Backward(forward, body, of, with_respect_to)
    backward.walk({name: _seed(forward, body, name) for name in of})
    return backward.problems, found


def _simplified(model: onnx.ModelProto, keep: Sequence[str], wanted: Sequence[str], plain: bool = False) -> Graph:
    """The graph of a model with functions inlined and simplified by the passes, of an opset that has gradients.

    Raises NotImplementedError for what no newer opset has.
    """
    model = inline_functions(model)
    raise_opset(model, PLAIN_OPSET if plain else LEAST_OPSET)
    graph = Graph(model, overridable(model).union(wanted), {*keep, *wanted}, plain)
    passes.simplify(graph)
    return graph


def _names(argument: str, names: str | Sequence[str]) -> list[str]:
    given = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else []
    if not given or not all(isinstance(name, str) for name in given):
        raise ArgumentTypeError(argument, f"is {names!r}, expected a name or several")
    return list(dict.fromkeys(given))


def prepared(simple: Graph, of: Sequence[str], wanted: Sequence[str], in_tiles: bool = True) -> Graph:
    """A graph in which what stands between the values `wanted` and `of` is written in operators that have rules.

    simple: a graph whose functions are inlined; used up. in_tiles: whether attention is recognized.

    Raises ValueError for a name that the graph does not have.
    """
    forward = simple.again(wanted, simple.kept)
    values = {each.name for each in forward.graph.input} | forward.initializers.keys() | forward.producers.keys()
    for name in (*of, *wanted):
        if name not in values:
            near = difflib.get_close_matches(name, values, 3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(f"the graph has no value {name!r}{hint}")
        dtype = forward.element_type(name)
        if dtype is not None and dtype not in FLOATS:
            found = TensorProto.DataType.Name(dtype)
            raise ValueError(f"{name!r} has elements of type {found}, expected a float type")
    expanded = expand(forward, of, wanted)
    return with_attention(expanded, of, wanted)[0] if in_tiles else expanded


def with_attention(forward: Graph, of: Sequence[str], wanted: Sequence[str]) -> tuple[Graph, list[Recognition]]:
    """The graph with nodes that stand for attention as a whole, and what became of each softmax before a product."""
    if not any(node.op_type == "Softmax" for node in forward.nodes()):
        return forward, []
    graph = forward.again(overridable(forward.model).union(wanted), forward.kept.union(of, wanted))
    passes.clean(graph)
    found = fuse_attention(graph)
    if not all(each.reason for each in found):
        graph.refresh()
        passes.clean(graph)
    return graph.again(wanted), found


def _seed(forward: Graph, body: GraphBody, name: str) -> Value:
    """Ones in the shape of a value: the gradient of the sum of its elements."""
    dtype, sizes = forward.element_type(name), forward.sizes(name)
    value = Value(body, name, dtype, sizes)
    body.scope(f"{name}/seed")
    one = body.number(1, value) if dtype else body.constant(np.ones((), np.float32))
    seed = one if sizes == [] else one.expand(value.shape())
    return body.declare(seed, dtype or TensorProto.FLOAT, sizes)


def differentiate(forward: Graph, body: GraphBody, seeds: dict[str, Value], wanted: Sequence[str]) -> dict[str, Value]:
    """The gradients of values, by their names, written into `body`.

    seeds: the gradients of the values that are differentiated.
    Raises ValueError where nothing that has a seed depends on one of the wanted values.
    """
    found = Backward(forward, body, seeds, wanted).run(seeds)
    values = {name: value for name, value in found.items() if value is not None}
    apart = [name for name in wanted if name not in values]
    if apart:
        raise ValueError(
            f"{' and '.join(map(repr, seeds))} cannot be differentiated with respect to "
            f"{' and '.join(map(repr, apart))}: no differentiable way leads from there to it"
        )
    return values


def append(forward: Graph, body: GraphBody, outputs: Sequence[onnx.ValueInfoProto]) -> None:
    """Add the outputs to the graph, and the nodes and initializers of `body` that they depend on."""
    body.keep([output.name for output in outputs])
    forward.reorder([*forward.nodes(), *body.nodes])
    forward.write_nodes()
    graph, model = forward.graph, forward.model
    graph.output.extend(outputs)
    graph.initializer.extend(body.initializers)
    declared = {each.name for each in (*graph.value_info, *graph.input, *graph.output)}
    graph.value_info.extend(info for name, info in body.infos.items() if name not in declared)
    import_microsoft(model)
    model.ir_version = max(model.ir_version, 4)  # before version 4 every initializer has to be an input, too


Segments = int | Sequence[str] | None


@dataclass(frozen=True)
class Differentiated:
    """A graph with its gradients, before its nodes are ordered and values of segments computed again.

    graph: its last outputs are the gradients. forward: the values that it computed before it was differentiated: the
    loss, and other outputs. gradients: for each parameter the value that is its gradient.
    """

    graph: Graph
    forward: tuple[str, ...]
    gradients: Mapping[str, str]

    def model(self, segments: Segments = None) -> onnx.ModelProto:
        """A model with its nodes in an order that needs little memory.

        segments: the number of segments of the forward part, or the names of values with whose nodes a segment ends.
        For the backward part only the values between segments and those of the last segment are kept; it computes all
        others again, which saves memory and costs about one more forward run. Random masks are kept. None: every value
        is kept.

        Raises TypeError and ValueError for other segments, and for names that no node of the forward part makes.
        """
        cuts, graph = checked_segments(segments), self.graph.copy()
        if cuts != 1:
            checkpoint(graph, self.forward, cuts)
        order_ends(graph)
        graph.commit()
        return graph.model


def checked_segments(given: Segments) -> int | list[str]:
    """The number of segments (1 for None), or the names. Raises TypeError and ValueError for anything else."""
    if given is None:
        return 1
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise ArgumentError(SEGMENTS, f"is {given}, expected at least 1")
        return given
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(SEGMENTS, f"is {given!r}, expected a number of segments or names of values")
    return names


def names_in(segments: Segments) -> list[str]:
    """The values with whose nodes a segment ends, which passes keep. Raises TypeError and ValueError, too."""
    checked = checked_segments(segments)
    return [] if isinstance(checked, int) else checked

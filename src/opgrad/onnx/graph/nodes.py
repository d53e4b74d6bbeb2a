"""Nodes: walks over them and their subgraphs, what they read, and what ONNX declares of them."""

import ast
import functools
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, TypeVar

import onnx
from onnx import AttributeProto, NodeProto, defs

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.messages import attribute_of, domain_of

Function = TypeVar("Function")
WITH_BODIES = ("If", "Loop", "Scan", "SequenceMap")  # operators of ai.onnx that have graphs


# --- walks ---


def subgraphs(node: onnx.NodeProto) -> Sequence[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    if node.op_type not in WITH_BODIES and not node.domain:
        return ()  # in a tenth of the time that a walk over the attributes takes
    one = onnx.AttributeProto.GRAPH
    return [graph for each in node.attribute for graph in ([each.g] if each.type == one else each.graphs)]


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def model_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a model and of its functions, with those of their subgraphs."""
    yield from all_nodes(model.graph.node)
    for function in model.functions:
        yield from all_nodes(function.node)


def captured(node: onnx.NodeProto) -> list[str]:
    """The names that a node reads: its inputs, and the values that its subgraphs read from outside."""
    return [*filter(None, node.input), *outside(node)]


def outside(node: onnx.NodeProto) -> list[str]:
    """The values that a node's subgraphs read from outside, each once."""
    graphs = subgraphs(node)
    return list(dict.fromkeys(name for graph in graphs for name in read_from_outside(graph))) if graphs else []


def read_from_outside(graph: onnx.GraphProto) -> Iterator[str]:
    """The names that the nodes and the outputs of a subgraph read and that it has not itself."""
    own = {each.name for each in (*graph.input, *graph.initializer)}
    own |= {name for inner in graph.node for name in inner.output}
    for inner in graph.node:
        yield from (name for name in captured(inner) if name not in own)
    yield from (each.name for each in graph.output if each.name not in own)


def read_by(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The names that nodes read, those that their subgraphs read from outside included."""
    return {name for node in nodes for name in captured(node)}


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Every name of a graph: those of values and those of nodes, also inside of subgraphs."""
    nodes = list(all_nodes(graph.node))
    found = {name for node in nodes for name in (node.name, *node.input, *node.output)}
    graphs = [graph, *(inner for node in nodes for inner in subgraphs(node))]
    return found | {each.name for inner in graphs for each in (*inner.input, *inner.initializer, *inner.output)}


def rename_inputs(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Let a node and its subgraphs read other values; names: from old to new ones."""
    if not names.keys().isdisjoint(node.input):
        node.input[:] = [names.get(each, each) for each in node.input]
    for graph in subgraphs(node):
        for inner in graph.node:
            rename_inputs(inner, names)
        for value in graph.output:
            value.name = names.get(value.name, value.name)


def rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename values wherever a node and its subgraphs read or make them; names: from old to new ones."""
    rename_inputs(node, names)
    for each in all_nodes([node]):
        each.output[:] = [names.get(name, name) for name in each.output]


def needed(nodes: Sequence[onnx.NodeProto], wanted: Iterable[str], given: Collection[str] = ()) -> list[onnx.NodeProto]:
    """The nodes that the wanted values depend on, in the order of the nodes, which is a topological one.

    given: values that are there already; nodes that only they depend on are left out.
    """
    names, found = set(wanted).difference(given), []
    for node in reversed(nodes):
        if not names.isdisjoint(node.output):
            names.update(set(captured(node)).difference(given))
            found.append(node)
    return found[::-1]


def sorted_nodes(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes, sorted topologically (Kahn 1962); where several may come next, the given order decides.

    Those of a circle, and those that depend on it, are left out.
    """
    listed, ordered = list(nodes), []
    makers = {name: index for index, node in enumerate(listed) for name in node.output if name}
    before = [{makers[name] for name in captured(node) if name in makers} for node in listed]
    if all(max(each, default=-1) < index for index, each in enumerate(before)):
        return listed
    sorter = TopologicalSorter(dict(enumerate(before)))
    with suppress(CycleError):
        sorter.prepare()
    ready = sorted(sorter.get_ready())
    while ready:
        index = heapq.heappop(ready)
        ordered.append(listed[index])
        sorter.done(index)
        for following in sorter.get_ready():
            heapq.heappush(ready, following)
    return ordered


def leave_out_results(node: onnx.NodeProto, read: Collection[str]) -> bool:
    """Remove the optional results that are not among the names `read`; whether there was one to remove."""
    before = len(node.output)
    if before > 1 and facts_of(node).results_are_optional:
        node.output[:] = [name if name in read else "" for name in node.output]
    while len(node.output) > 1 and not node.output[-1]:
        node.output.pop()
    return len(node.output) < before


def title(node: onnx.NodeProto) -> str:
    """The node's name in messages."""
    operator = f"{node.domain}.{node.op_type}" if domain_of(node) else node.op_type
    return (
        f"{operator} (node {node.name!r})"
        if node.name
        else f"{operator} (the node that makes {next(filter(None, node.output), '')!r})"
    )


def reads_values(node: onnx.NodeProto) -> bool:
    """Whether a node reads more of its inputs than their shapes."""
    return node.op_type not in ("Shape", "Size") or bool(domain_of(node))


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node by their names, text decoded."""
    return dict(map(attribute_of, node.attribute))


def registering(table: dict[str, Function]) -> Callable[..., Callable[[Function], Function]]:
    """A decorator that enters a function in a table under the names of the operators that it is given."""

    def declare(*operators: str) -> Callable[[Function], Function]:
        def enter(function: Function) -> Function:
            table.update(dict.fromkeys(operators, function))
            return function

        return enter

    return declare


def is_known(op: str, opset: int) -> bool:
    """Whether ai.onnx has an operator in an opset; onnxruntime has others in this domain, and some in older opsets."""
    return defs.has(op, opset, "") and not defs.get_schema(op, opset, "").deprecated


# Of the exporter by torch.export: the paths of all modules around a node, and the call for which it is written.
SCOPES, CALL = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.fx_node"


def call_of(node: onnx.NodeProto) -> str:
    """The call of PyTorch for which a node was written; "" if it tells none."""
    return next((each.value for each in node.metadata_props if each.key == CALL), "")


def detaches(node: onnx.NodeProto) -> bool:
    """Whether a node stands for Tensor.detach, through which no gradient goes."""
    return node.op_type == "Identity" and "target=torch.ops.aten.detach." in call_of(node)


def module_path(node: onnx.NodeProto) -> str | None:
    """The path of a node's module, such as model.layers.0.self_attn.q_proj; None if the node tells nothing of it.

    The older exporter names nodes by it: /model/layers.0/self_attn/q_proj/MatMul, and /layers.0/layers.0.1/MatMul for a
    module in a list in a list.
    """
    written = next((each.value for each in node.metadata_props if each.key == SCOPES), None)
    if written is None:
        parts = node.name.split("/")[1:]
        names = [part for part, inner in itertools.pairwise(parts) if not inner.startswith(f"{part}.")]
        return ".".join(names) if node.name.startswith("/") else None
    try:
        scopes = ast.literal_eval(written)
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return None
    is_list = isinstance(scopes, list) and len(scopes) > 1 and all(isinstance(each, str) for each in scopes)
    return scopes[-2] if is_list else None


# What a rule or a pass raises for a node of a damaged model, where it expects none.
FAILURES = ArithmeticError, AttributeError, LookupError, TypeError, ValueError


class DamagedNode(ValueError):
    """A node that its operator does not take so; the text names it."""


class Declaration(NamedTuple):
    """An operator in one version of ONNX's operators.

    inputs, outputs: the least and the largest number of them. needed: the places of inputs that may not be left out.
    attributes: the names of those that a node must have. types: of all attributes, by name.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    needed: tuple[int, ...]
    attributes: frozenset[str]
    types: Mapping[str, int]


@functools.cache
def declaration(kind: str, version: int) -> Declaration | None:
    """The declaration of an operator; None for an unknown one."""
    try:
        schema: Any = onnx.defs.get_schema(kind, version)  # onnx's type stubs lack members read below
    except (onnx.defs.SchemaError, OverflowError, TypeError, ValueError):
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return Declaration(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(index for index, each in enumerate(schema.inputs) if each.option == single),
        frozenset(name for name, each in schema.attributes.items() if each.required),
        {name: int(each.type.value) for name, each in schema.attributes.items()},
    )


def faults_of_nodes(graph: Any, imports: Iterable[Any]) -> Iterator[str | None]:
    """In what each node of ONNX's own domain in a graph or a function differs from its declaration; None in nothing."""
    version = max((each.version for each in imports if each.domain in ("", "ai.onnx")), default=0)
    return (_fault(node, version) for node in all_nodes(graph.node) if not domain_of(node))


def _fault(node: NodeProto, version: int) -> str | None:
    declared = declaration(node.op_type, version)
    if declared is None:
        return None
    faults = []
    for what, found, (least, most) in (
        ("inputs", len(node.input), declared.inputs), ("outputs", len(node.output), declared.outputs)
    ):  # fmt: skip
        if found < least:
            faults.append(f"{found} {what}, expected at least {least}")
        elif found > most:
            faults.append(f"{found} {what}, expected at most {most}")
    lacking = declared.attributes - {each.name for each in node.attribute}
    if lacking:
        faults.append(f"no attribute {min(lacking)!r}")
    name_of = AttributeProto.AttributeType.Name
    for each in node.attribute:
        expected = declared.types.get(each.name, each.type)
        if each.type and each.type != expected:
            faults.append(f"an attribute {each.name!r} of type {name_of(each.type)}, expected {name_of(expected)}")
    faults += [f"no input {index}" for index in declared.needed if not "".join(node.input[index : index + 1])]
    return f"the node {node.name!r} ({node.op_type}) has {faults[0]}" if faults else None


@contextmanager
def naming(node: NodeProto) -> Iterator[None]:
    """Within the `with` block, turn whatever fails on a damaged node into a ValueError that names the node."""
    try:
        yield
    except FAILURES as error:
        raise refusal(node, error) from error


def refusal(node: NodeProto, failure: Exception) -> ValueError:
    """The error for a node on which one of FAILURES was raised; one that names a node already is itself."""
    if isinstance(failure, DamagedNode):
        return failure
    reason = " ".join(str(failure).split())
    return DamagedNode(f"{title(node)} has inputs or attributes that its operator does not take: {reason}")

"""What ONNX declares of its operators, and in what the nodes of an untrusted model differ from it.

Everything that works on a graph afterwards may rely on the number of a node's inputs and outputs, on the attributes
that it must have, and on their types. Operators of other domains are not declared here: `naming` turns what fails on
them into a ValueError.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import onnx
from onnx import AttributeProto, NodeProto

from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import all_nodes, title

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
        tuple(place for place, each in enumerate(schema.inputs) if each.option == single),
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
    fault = (
        _fault_of_count("inputs", len(node.input), declared.inputs)
        or _fault_of_count("outputs", len(node.output), declared.outputs)
        or _fault_of_attributes(node, declared)
        or next((f"no input {place}" for place in declared.needed if not "".join(node.input[place : place + 1])), None)
    )
    return fault and f"the node {node.name!r} ({node.op_type}) has {fault}"


def _fault_of_count(what: str, count: int, bounds: tuple[int, int]) -> str | None:
    least, most = bounds
    if least <= count <= most:
        return None
    return f"{count} {what}, expected at {'least' if count < least else 'most'} {least if count < least else most}"


def _fault_of_attributes(node: NodeProto, declared: Declaration) -> str | None:
    lacking = declared.attributes - {each.name for each in node.attribute}
    if lacking:
        return f"no attribute {min(lacking)!r}"
    name_of = AttributeProto.AttributeType.Name
    for each in node.attribute:
        expected = declared.types.get(each.name, each.type)
        if each.type and each.type != expected:
            return f"an attribute {each.name!r} of type {name_of(each.type)}, expected {name_of(expected)}"
    return None


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

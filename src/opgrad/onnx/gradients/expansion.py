"""Which values carry gradients, and nodes without a gradient rule, which are replaced by nodes that have one.

Calls of functions are replaced by their bodies, an If with a constant condition by the branch that it takes, and
composed operators by their decompositions.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, inliner

from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT, copied, domain_of, free_name, keep
from opgrad.onnx.graph.nodes import all_nodes, detaches, naming, needed, outside, read_from_outside, rename, subgraphs
from opgrad.onnx.graph.subgraphs import in_bodies, sequence_type
from opgrad.onnx.rules.coverage import reason
from opgrad.onnx.rules.node import RULES, Declared, Gradients, Node, NoGradient
from opgrad.onnx.rules.quantization import QUANTIZING

NO_RULE = "there is no rule for it; opgrad.gradients.register_gradient adds one"
# The integers that these operators write or read carry gradients, too: the gradient passes straight through the
# rounding and is that of the floats which the integers stand for (straight-through estimator).
DEQUANTIZING = "DequantizeLinear"
CASTS = ("Cast", "CastLike")
RETYPING = (*CASTS, "MatMulInteger", "ConvInteger")  # which give integers of other types


def paths(forward: Graph, of: Iterable[str], wanted: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes between the values `wanted` and the values `of`, in the graph's order."""
    reached, between = depending(forward, wanted), set(of)
    nodes = []
    for node in reversed(list(forward.nodes())):
        if between.intersection(node.output) and reached.intersection(node.output):
            carried = [name for name in differentiable_inputs(forward, node) if name in reached]
            if carried:
                nodes.append(node)
                between.update(carried)
    return nodes[::-1]


def depending(forward: Graph, wanted: Iterable[str]) -> set[str]:
    """The wanted values and all values that can be differentiated with respect to one of them."""
    reached = set(wanted)
    for node in forward.nodes():
        if reached.intersection(differentiable_inputs(forward, node)):
            reached.update(name for name in node.output if name and carries(forward, name))
    return reached


def carries(forward: Graph, name: str) -> bool:
    """Whether a value can have a gradient."""
    dtype = forward.sequence(name) or forward.element_type(name)
    return dtype in (None, *FLOATS) or name in quantized(forward)


def quantized(forward: Graph) -> set[str]:
    """The names of all integer values that stand for floats.

    They are what the graph quantizes floats to, what it copies, selects or computes from such integers, and integers
    whose gradient is asked for.
    """
    if forward.quantized is None:
        floats = (None, TensorProto.BOOL, *FLOATS)
        forward.quantized = found = {name for name in forward.variable if forward.element_type(name) not in floats}
        for node in forward.nodes():
            if node.op_type in QUANTIZING and domain_of(node) in ("", MICROSOFT):
                found.add(node.output[0])
            elif node.op_type != DEQUANTIZING and (read := found.intersection(_differentiable(node))):
                # A float, a condition or an index does not. A result of unknown type, or a sequence, may hold them.
                moved = rule_of(node).integers and node.op_type not in RETYPING
                dtypes = {forward.element_type(each) for each in read}
                for name in filter(None, node.output):
                    dtype = forward.element_type(name)
                    if dtype is None or (dtype in dtypes if moved else dtype not in floats):
                        found.add(name)
    return forward.quantized


def cut_off(forward: Graph, of: Iterable[str], reached: Collection[str]) -> Iterator[onnx.NodeProto]:
    """The casts of floats to integers that DequantizeLinear takes for floats again.

    No gradient passes through such a cast, and beside another way to the same floats nobody would notice.
    of: the values that are differentiated. reached: those that depend on the wanted ones.
    """
    moved = set[str]()
    for node in reversed(needed(list(forward.nodes()), of)):
        if node.op_type == DEQUANTIZING:
            moved.add(node.input[0])
        elif moved.isdisjoint(node.output):
            continue
        elif node.op_type in CASTS and forward.element_type(node.input[0]) in FLOATS:
            if node.input[0] in reached:
                yield node
        elif rule_of(node).integers:
            moved.update(_differentiable(node))


def taken_branch(forward: Graph, node: onnx.NodeProto) -> onnx.GraphProto | None:
    """The branch of an If that every run takes, as its condition is a constant; None for another node."""
    condition = forward.constant(node.input[0]) if node.op_type == "If" and not domain_of(node) else None
    if condition is None:
        return None
    name = "then_branch" if np.all(condition) else "else_branch"
    return next(each.g for each in node.attribute if each.name == name)


def taken_nodes(forward: Graph, nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes and those of their subgraphs, without branches that no run takes."""
    for node in nodes:
        yield node
        branch = taken_branch(forward, node)
        for graph in subgraphs(node) if branch is None else [branch]:
            yield from taken_nodes(forward, graph.node)


def _differentiable(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads at places that have a gradient."""
    skipped = (0,) if detaches(node) else rule_of(node).constant
    given = (name for index, name in enumerate(node.input) if name and index not in skipped)
    return itertools.chain(given, outside(node))


def differentiable_inputs(forward: Graph, node: onnx.NodeProto) -> list[str]:
    """The names that a node reads and that have a gradient if its results have one."""
    branch = taken_branch(forward, node)
    names = _differentiable(node) if branch is None else read_from_outside(branch)
    return [name for name in names if carries(forward, name)]


def rule_of(node: onnx.NodeProto) -> Declared:
    """The rule of a node; an operator without a rule gets one that raises NoGradient with the reason."""
    return RULES.get((domain_of(node), node.op_type)) or Declared(node.op_type, node.domain, _no_rule)


def _no_rule(node: Node) -> Gradients:
    raise NoGradient(reason(domain_of(node.proto), node.proto.op_type) or NO_RULE)


DOMAIN = "opgrad.expanded"


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each call of its own functions replaced by the function's body, unless the function has a rule."""
    own = {(function.domain, function.name) for function in model.functions}
    ruled = [key for key in own if key in RULES]
    if not own - set(ruled):
        return model
    if not ruled:
        return inliner.inline_local_functions(model)
    return inliner.inline_selected_functions(model, ruled, exclude=True)


def expand(forward: Graph, of: Iterable[str], wanted: Iterable[str]) -> Graph:
    """Expand the nodes between the values `wanted` and `of` that have no gradient rule.

    Those in the bodies of loops and branches are expanded, too.
    The forward graph is changed in place; only where bodies of ONNX's functions are inserted is the result a new one.
    """

    def expand_body(body: Graph) -> Graph:  # all of whose inputs and outputs may have gradients
        inputs, outputs = ([each.name for each in values] for values in (body.graph.input, body.graph.output))
        return expand(body, outputs, [name for name in inputs if carries(body, name)])

    of, wanted = list(of), list(wanted)
    taken = forward.taken  # the names of the graph and of those around it, and the prefixes of names of earlier rounds
    while True:
        nodes = paths(forward, of, wanted)
        written = []
        for node in nodes:
            others = _branch(forward, node, taken)
            others = _decomposed(forward, node, taken) if others is None else others
            if others is not None:
                written.append((node, others))
        for node, others in written:
            forward.substitute(node, others)
        if written:
            forward.refresh()
            continue
        unknown = [node for node in nodes if (domain_of(node), node.op_type) not in RULES]
        model = _expand_functions(forward, unknown)
        if model is None:
            in_bodies(forward, expand_body)
            forward.refresh()
            return forward
        forward = Graph(model, wanted, forward.kept, taken=taken, known=forward)


def _expand_functions(forward: Graph, nodes: Iterable[onnx.NodeProto]) -> onnx.ModelProto | None:
    """The model with each of these nodes replaced by the body that ONNX defines; None if no node has a body."""
    functions: list[onnx.FunctionProto] = []
    for node in nodes:
        function = _function(forward, node)
        if function is not None:
            function.domain, function.name = DOMAIN, f"{node.op_type}_{len(functions)}"
            node.op_type, node.domain = function.name, DOMAIN
            keep(node.attribute, [each for each in node.attribute if each.name in function.attribute])
            functions.append(function)
    if not functions:
        return None
    before = forward.names()
    forward.model.functions.extend(functions)
    forward.model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    inlined = inliner.inline_local_functions(forward.model)
    # Rename the values of inserted bodies that graphs around this one, or beside it, have already.
    new = {name for node in all_nodes(inlined.graph.node) for name in node.output if name} - before
    names = {name: free_name(name, forward.taken) for name in sorted(new)}
    for node in inlined.graph.node:
        rename(node, names)
    keep(inlined.opset_import, [each for each in inlined.opset_import if each.domain != DOMAIN])
    return inlined


def _function(forward: Graph, node: onnx.NodeProto) -> onnx.FunctionProto | None:
    """The body that ONNX defines for an operator, for the opset of the model."""
    if domain_of(node):
        return None
    try:
        schema: Any = defs.get_schema(node.op_type, forward.opset, "")  # onnx's type stubs lack the members read below
    except defs.SchemaError:
        return None
    if node.op_type == "SequenceMap":
        (body,) = subgraphs(node)  # may not declare what it returns: onnx makes lists of these types for its loop
        for name, value in zip(node.output, body.output, strict=False):
            inside = forward.sequence(name)
            if inside and value.type.WhichOneof("value") is None:
                value.type.CopyFrom(helper.make_tensor_type_proto(inside, None))
    function = onnx.FunctionProto()
    versions = [each for each in schema.function_opset_versions if each <= forward.opset]
    if versions:
        function.ParseFromString(schema.get_function_with_opset_version(max(versions)))
    elif any(name and not _type_bytes(forward, name) for name in node.input):
        return None  # onnx builds this body from the inputs' types, and one of them is unknown
    elif dependent := [each for each in schema.context_dependent_function_opset_versions if each <= forward.opset]:
        types = [_type_bytes(forward, name) for name in node.input]
        body = schema.get_context_dependent_function_with_opset_version(max(dependent), node.SerializeToString(), types)
        if not body:
            return None
        function.ParseFromString(body)
    else:
        return None
    del function.opset_import[:]
    function.opset_import.append(helper.make_opsetid("", forward.opset))
    given = {each.name for each in node.attribute}
    defaults = [each.default_value for name, each in schema.attributes.items() if name not in given]
    node.attribute.extend(each for each in defaults if each.name and each.name in function.attribute)
    return function


def _type_bytes(forward: Graph, name: str) -> bytes:
    """The type of a value as a message, empty if it is not known or the value is missing."""
    dtype = forward.element_type(name) if name else None
    if dtype is not None:
        return helper.make_tensor_type_proto(dtype, forward.sizes(name)).SerializeToString()
    inside = forward.sequence(name) if name else None
    return sequence_type(inside, forward.sizes_in_sequence(name)).SerializeToString() if inside else b""


def _branch(forward: Graph, node: onnx.NodeProto, taken: set[str]) -> list[onnx.NodeProto] | None:
    """The nodes of the branch of an If whose condition is a constant."""
    branch = taken_branch(forward, node)
    if branch is None:
        return None
    renamed: dict[str, str] = {}
    for inner in branch.node:
        renamed |= {name: free_name(f"{node.name or 'If'}/{name}", taken) for name in inner.output if name}
    renamed |= {each.name: free_name(f"{node.name or 'If'}/{each.name}", taken) for each in branch.initializer}
    nodes = [copied(inner) for inner in branch.node]
    for inner in nodes:
        rename(inner, renamed)
        inner.name = free_name(inner.name, taken) if inner.name else ""
    for tensor in branch.initializer:
        copy = forward.graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name = renamed[tensor.name]
    results = zip(branch.output, node.output, strict=True)
    return nodes + [helper.make_node("Identity", [renamed.get(a.name, a.name)], [b]) for a, b in results if b]


def _decomposed(forward: Graph, node: onnx.NodeProto, taken: set[str]) -> list[onnx.NodeProto] | None:
    """What a decomposition writes for a node."""
    declared = RULES.get((domain_of(node), node.op_type))
    if declared is None or not declared.replaces:
        return None
    body = GraphBody(forward.opset, taken)
    body.scope(node.name or node.op_type)
    try:
        with naming(node):
            given = declared.rule(Node(node, forward, body, [], []))
    except NoGradient:
        return None  # the node stays; its gradient rule raises NoGradient again, with the reason
    results = [given] if isinstance(given, Value) else list(given or [])
    wanted = [(value, name) for value, name in zip(results, node.output, strict=False) if value is not None and name]
    body.keep([value.name for value, _ in wanted])
    forward.graph.initializer.extend(body.initializers)
    return [*body.nodes, *(helper.make_node("Identity", [value.name], [name]) for value, name in wanted)]

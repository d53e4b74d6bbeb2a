"""Removal of nodes that change nothing or are computed twice, and fusion of pairs such as two Transposes."""

import hashlib
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.conversion import trains
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.graph import AMPLIFIED, FOLDED, Graph, constant_tensor, evaluate
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of, names_of
from opgrad.onnx.graph.nodes import attributes_of, detaches, leave_out_results, needed, read_by, registering, subgraphs
from opgrad.onnx.graph.sizes import are_equal
from opgrad.onnx.passes.patterns import at_each
from opgrad.onnx.passes.sizes import Shapes, Term, slice_limits, terms_of

Test = Callable[[Graph, onnx.NodeProto], bool]
TESTS: dict[str, Test] = {}
DROPOUT_TRAINS_FROM = 12  # the first opset with a Dropout that can train
# For each type the types that represent all of its values exactly.
WIDER: dict[int, tuple[int, ...]] = {
    TensorProto.FLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.BFLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.FLOAT: (TensorProto.DOUBLE,),
    TensorProto.INT32: (TensorProto.INT64, TensorProto.DOUBLE),
    TensorProto.BOOL: (TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE),
}


# Registers a test of whether the first result of these operators equals their first input.
unchanged = registering(TESTS)


def _is_read(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether something reads the first result, and nothing reads another one."""
    needed = [bool(name) and (name in graph.kept or bool(graph.readers.get(name))) for name in node.output]
    return needed[:1] == [True] and not any(needed[1:])


def _sizes_stay(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether the result is known to have the sizes of the first input."""
    return are_equal(graph.sizes(node.input[0]), graph.sizes(node.output[0]))


unchanged("Identity")(lambda graph, node: not detaches(node))


@unchanged("Dropout")
def _dropout(graph: Graph, node: onnx.NodeProto) -> bool:
    if graph.opset < DROPOUT_TRAINS_FROM or len(node.input) < 3 or not node.input[2]:
        return True
    training = graph.constant(node.input[2])
    return training is not None and not np.any(training)


unchanged("Cast")(lambda graph, node: graph.element_type(node.input[0]) == attributes_of(node)["to"])


@unchanged("CastLike")
def _cast_like(graph: Graph, node: onnx.NodeProto) -> bool:
    own, other = (graph.element_type(name) for name in node.input)
    return own is not None and own == other


@unchanged("Reshape")
def _reshape(graph: Graph, node: onnx.NodeProto) -> bool:
    before, after = (graph.sizes(name) for name in (node.input[0], node.output[0]))
    if before is None or after is None or len(before) != len(after):
        return False
    # One size of several follows from the others, unless one of them is 0.
    equal = sum(a == b and isinstance(a, int) and a > 0 for a, b in zip(before, after, strict=True))
    return equal >= len(before) - 1 if before else True


unchanged("Flatten", "Squeeze", "Unsqueeze")(lambda graph, node: _sizes_stay(graph, node))


@unchanged("Tile")
def _tile(graph: Graph, node: onnx.NodeProto) -> bool:
    copies = Shapes(graph).numbers(node.input[1])
    return copies is not None and set(copies) <= {1}


@unchanged("Expand")
def _expand(graph: Graph, node: onnx.NodeProto) -> bool:
    target, sizes = Shapes(graph)(node.input[1]), terms_of(graph, node.input[0])
    if _sizes_stay(graph, node) or target is None or sizes is None or len(target) > len(sizes):
        return _sizes_stay(graph, node)
    last = sizes[len(sizes) - len(target) :]
    return all(
        wanted == Term(1) or (wanted == own and own is not None) for own, wanted in zip(last, target, strict=True)
    )


@unchanged("Transpose")
def _transpose(graph: Graph, node: onnx.NodeProto) -> bool:
    order = attributes_of(node).get("perm")
    if order is None:
        sizes = graph.sizes(node.input[0])
        return sizes is not None and len(sizes) < 2
    return list(order) == sorted(order)


unchanged("Concat", "Sum", "Max", "Min", "Mean")(lambda graph, node: len(node.input) == 1)


@unchanged("Slice")
def _slice(graph: Graph, node: onnx.NodeProto) -> bool:
    limits, sizes = slice_limits(Shapes(graph), node), terms_of(graph, node.input[0])
    if limits is None or sizes is None:
        return False
    for axis, start, end, step in limits:
        size, last = sizes[axis], end.number if end is not None else None
        own = size.number if size is not None else None
        is_far = last is not None and (last >= np.iinfo(np.int32).max or (own is not None and last >= own))
        if start != Term(0) or step != Term(1) or end is None or not (end == size or is_far):
            return False
    return True


@unchanged("Pad")
def _pad(graph: Graph, node: onnx.NodeProto) -> bool:
    given = attributes_of(node).get("pads", attributes_of(node).get("paddings"))
    pads = given if given is not None else graph.constant(node.input[1]) if len(node.input) > 1 else None
    return pads is not None and not np.any(pads)


unchanged("Add", "Sub")(lambda graph, node: _is_neutral(graph, node.input, 0))
unchanged("Mul", "Div", "Pow")(lambda graph, node: _is_neutral(graph, node.input, 1))


def _is_neutral(graph: Graph, operands: Sequence[str], number: float) -> bool:
    """Whether the second operand is this number and its axes are no more than those of the first."""
    sizes, own = (graph.sizes(name) for name in operands)
    fits = sizes is not None and own is not None and len(own) <= len(sizes)
    return fits and graph.scalar(operands[1]) == number


@at_each(*TESTS)
def remove_no_ops(graph: Graph, node: onnx.NodeProto) -> bool:
    """Let the readers of a node that changes nothing read the node's input instead."""
    if not node.input or not node.input[0] or not _is_read(graph, node):
        return False
    if TESTS[node.op_type](graph, node):
        return graph.alias(node.output[0], node.input[0])
    neutral = {"Add": 0, "Mul": 1}.get(node.op_type)
    is_second = neutral is not None and _is_neutral(graph, node.input[::-1], neutral)
    return is_second and graph.alias(node.output[0], node.input[1])


@at_each("Cast", "Transpose", "Reshape")
def join_pairs(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace two successive Casts, Transposes or Reshapes by one, or by none if they cancel out."""
    first = graph.maker(node.input[0], node.op_type) if _is_read(graph, node) else None
    if first is None:
        return False
    source, attributes = first.input[0], attributes_of(node)
    inputs, is_inner = [source], graph.inner(first.output[0])
    if node.op_type == "Cast":
        before, between = graph.element_type(source), graph.element_type(node.input[0])
        if before is None or between not in WIDER.get(before, ()):
            return False
        if attributes["to"] == before:
            return graph.alias(node.output[0], source)
        attributes = {"to": attributes["to"]}
    elif node.op_type == "Transpose":
        outer, order = attributes.get("perm"), attributes_of(first).get("perm")
        if order is None or outer is None:
            return False
        attributes = {"perm": [order[axis] for axis in outer]}
        if attributes["perm"] == sorted(attributes["perm"]):
            return graph.alias(node.output[0], source)
        if not is_inner:
            return False  # two transposes of one value would both run; runtimes fuse a single one into a product
    else:
        target = graph.constant(node.input[1]) if len(node.input) > 1 else None
        if target is None or 0 in target or not is_inner:
            return False
        inputs.append(node.input[1])
    graph.substitute(node, [graph.node(node.op_type, inputs, node.output, **attributes)])
    return True


def remove_dead(graph: Graph) -> bool:
    """Remove the nodes that no output and no kept value depends on; an initializer's removal makes no other change."""
    nodes = list(graph.nodes())
    kept = needed(nodes, graph.kept)
    read, places = read_by(kept).union(graph.kept), {id(node) for node in kept}
    changed = len(kept) < len(nodes)
    for node in nodes:
        if id(node) not in places:
            graph.substitute(node, [])
    for node in kept:
        changed |= leave_out_results(node, read)
    tensors = graph.graph.initializer
    for index in reversed(range(len(tensors))):
        if tensors[index].name not in read:
            del graph.initializers[tensors[index].name], tensors[index]
    return changed


LARGEST_SHARED = 1 << 16  # the most bytes of a constant that is compared with others


def share_nodes(graph: Graph) -> bool:
    """Keep only the first of nodes with the same operator, attributes and inputs."""
    first: dict[Hashable, onnx.NodeProto] = {}
    changed = False
    for node in list(graph.nodes()):
        own = first.setdefault(_key(node), node) if is_repeatable(node) else node
        if own is node or graph.kept.intersection(node.output):
            continue
        for place, name in enumerate(node.output):
            if not name:
                continue
            own.output.extend([""] * (place + 1 - len(own.output)))
            if not own.output[place]:  # an optional result that the first one lacks
                own.output[place] = graph.free(name)
                graph.producers[own.output[place]] = own
                graph.declare_like(own.output[place], name)
            graph.alias(name, own.output[place])
        graph.substitute(node, [])
        changed = True
    return changed


def is_repeatable(node: onnx.NodeProto) -> bool:
    """Whether a node always gives the same results for the same inputs."""
    known = domain_of(node) in ("", MICROSOFT) and not facts_of(node).once
    trains = node.op_type == "BatchNormalization" and len(node.output) > 1
    return known and not trains and not any(subgraphs(node))


def _key(node: onnx.NodeProto) -> Hashable:
    attributes = sorted(each.SerializeToString(deterministic=True) for each in node.attribute)
    inputs = list(node.input)
    while inputs and not inputs[-1]:
        inputs.pop()
    return domain_of(node), node.op_type, tuple(inputs), tuple(attributes)


def share_constants(graph: Graph) -> bool:
    """Keep only the first of equal initializers that are no parameters."""
    first: dict[Hashable, str] = {}
    changed, apart = False, set(graph.kept)
    for node in graph.nodes():  # which write into their inputs, or will do so in the training graph
        is_norm = node.op_type == "BatchNormalization" and not domain_of(node)
        if (domain_of(node) and facts_of(node).once) or (is_norm and trains(node, graph.opset)):
            apart.update(node.input)
    for tensor in list(graph.graph.initializer):
        if tensor.name in apart or uses_external_data(tensor) or tensor.ByteSize() > LARGEST_SHARED:
            continue
        own = first.setdefault(_content(tensor), tensor.name)
        if own != tensor.name and tensor.name in graph.readers:
            graph.alias(tensor.name, own)
            changed = True
    return changed


def _content(tensor: onnx.TensorProto) -> Hashable:
    if tensor.HasField("raw_data"):
        return tensor.data_type, tuple(tensor.dims), hashlib.sha256(tensor.raw_data).digest()
    bare = copied(tensor)
    bare.name = bare.doc_string = ""
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()


GROWTH = 1 << 12  # the most bytes by which a folded value may be larger than the constants it is computed from
FOLDABLE = FOLDED | names_of(
    """
    Abs Exp Log Sign Sin Cos Tanh Sigmoid Round GreaterOrEqual LessOrEqual Trilu Tile Split Flatten Clip MatMul Gemm
    CumSum ReduceSum ReduceMax ReduceMin ReduceMean ScatterND ScatterElements GatherND GatherElements OneHot
    CastLike Sum Mean Xor EyeLike ArgMax ArgMin Relu IsNaN IsInf
    """
)


@at_each("Constant", *FOLDABLE)
def fold_constants(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace Constant nodes, and nodes whose inputs are all constants, by initializers."""
    if graph.kept.intersection(node.output):
        return False
    if node.op_type == "Constant":
        tensor = constant_tensor(node)
        tensors = None if tensor is None else {node.output[0]: tensor}
        graph.room += 0 if tensor is None else AMPLIFIED * tensor.ByteSize()
    else:
        tensors = _computed(graph, node)
    if tensors is not None:
        graph.become_constants(node, tensors)
    return tensors is not None


def _computed(graph: Graph, node: onnx.NodeProto) -> dict[str, onnx.TensorProto] | None:
    """The results of a node whose inputs are all constants; None if they are not, or would be large."""
    if node.op_type in ("Shape", "Size"):
        value = graph.constant(node.output[0])
        return None if value is None else {node.output[0]: numpy_helper.from_array(value)}
    names = [name for name in node.input if name]
    if not all(name in graph.initializers for name in names):
        return None
    inputs = [value for name in names if (value := graph.constant(name)) is not None]
    if len(inputs) < len(names):
        return None
    held = {name: each.nbytes for name, each in zip(names, inputs, strict=True)}
    results = evaluate(node, inputs, graph.opset, min(GROWTH + sum(held.values()), max(GROWTH, graph.room)))
    if results is None:
        return None
    outputs = [name for name in node.output if name]
    kinds = [graph.element_type(name) for name in outputs]
    if any(kind != helper.np_dtype_to_tensor_dtype(each.dtype) for kind, each in zip(kinds, results, strict=True)):
        return None
    graph.room -= sum(each.nbytes for each in results if each.nbytes > GROWTH)
    return {name: numpy_helper.from_array(each) for name, each in zip(outputs, results, strict=True)}


@at_each("Sum")
def chain_sums(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace a Sum of values of one shape by additions in its order.

    onnxruntime's Sum needs memory for its result while all of its inputs are in memory. An addition writes into its
    first input, and the memory of each other input is free as soon as it was added.
    """
    whole, sizes = graph.sizes(node.output[0]), [graph.sizes(name) for name in node.input]
    if len(sizes) < 2:
        return False
    if len(sizes) > 2:  # of two inputs an addition broadcasts as well
        for each in sizes:
            if whole is None or (each is not None and len(each) != len(whole)):
                return False
            if any(a != b and None not in (a, b) for a, b in zip(each or (), whole, strict=False)):
                return False
    total, additions = node.input[0], []
    equal = all(are_equal(each, whole) for each in sizes)
    for name in node.input[1:-1]:
        part = graph.free(f"{node.output[0]}/part")
        if equal:
            graph.declare_like(part, node.output[0])
        additions.append(graph.node("Add", [total, name], [part]))
        total = part
    additions.append(helper.make_node("Add", [total, node.input[-1]], node.output, node.name))
    graph.substitute(node, additions)
    return True


@at_each("Transpose")
def transpose_products(graph: Graph, node: onnx.NodeProto) -> bool:
    """Replace (a @ b).T by b.T @ a.T; gradients of weights that a graph transposes have this form."""
    product = graph.maker(node.input[0], "Gemm")
    if product is None or not graph.inner(node.input[0]) or len([name for name in product.input if name]) > 2:
        return False
    if attributes_of(node).get("perm", [1, 0]) != [1, 0]:
        return False
    given = attributes_of(product)
    other = {"transA": 1 - given.get("transB", 0), "transB": 1 - given.get("transA", 0)}
    attributes = {name: value for name, value in {**given, **other}.items() if value or name not in other}
    swapped = [product.input[1], product.input[0]]
    graph.substitute(node, [helper.make_node("Gemm", swapped, [node.output[0]], product.name, **attributes)])
    return True

"""The bodies of If, Loop and Scan as models of their own, so that whatever works on a graph works on a body, too.

A body reads values of the graphs around it by their names. In the model these are inputs, or initializers where they
are small constants. Sizes that are not known get names there: what a body reads from outside has the same sizes in all
iterations of a loop, and so has a state whose sizes the body leaves as they are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper

from opgrad.onnx.graph.graph import Graph, constant_tensor
from opgrad.onnx.graph.messages import FLOATS, LARGE, copied, copied_without, domain_of, free_name, keep, size_of
from opgrad.onnx.graph.nodes import all_nodes, attributes_of, names_in, read_from_outside, rename_inputs, subgraphs
from opgrad.onnx.graph.sizes import VAGUE, Size, Sizes

IF, LOOP, SCAN = "If", "Loop", "Scan"
FIRST_STATE = {LOOP: 2, SCAN: 0}  # the place of the first state among a node's inputs, and among those of its body
TURN_AND_CONDITION = (
    helper.make_tensor_type_proto(TensorProto.INT64, []),
    helper.make_tensor_type_proto(TensorProto.BOOL, []),
)


def state_count(node: onnx.NodeProto) -> int:
    """The number of values that a Loop or Scan hands from iteration to iteration."""
    scanned = attributes_of(node).get("num_scan_inputs", 0) if node.op_type == SCAN else 0
    return len(node.input) - FIRST_STATE[node.op_type] - int(scanned)


def scan_axis(node: onnx.NodeProto, index: int, of: str, rank: int) -> int:
    """The axis of steps of a scan's input or output. of: "input" or "output". index: among those with steps."""
    axes = attributes_of(node).get(f"scan_{of}_axes") or [0] * (index + 1)
    return int(axes[index]) % max(rank, 1)


def is_reversed(node: onnx.NodeProto, of: str, index: int) -> bool:
    """Whether a Scan goes through an input, or writes an output, from the end; of and place as of `scan_axis`."""
    directions = attributes_of(node).get(f"scan_{of}_directions")
    return bool(directions and directions[index])


class Enclosed:
    """A body of a node of the graph `outer` as a model of its own.

    Sizes of states are assumed to stay, until the body is seen to change them.

    body: its message, which `restore` writes. graph: the body's graph, whose inputs are those of the body and behind
    them the values from outside. outside: the names of these values.
    steady: the names of sizes that are the same in each iteration. made: names of sizes that were made up here.
    """

    def __init__(self, outer: Graph, node: onnx.NodeProto, body: onnx.GraphProto):
        self.outer, self.node, self.body = outer, node, body
        self.outside = dict.fromkeys(read_from_outside(body))
        self.steady, self.made = set[str](), set[str]()
        model = copied_without(outer.model, "graph")
        model.graph.CopyFrom(body)
        model.graph.name = body.name or "body"
        # Remove the names of sizes that only the body has: they may stand for another size in each iteration.
        known = {size.dim_param for value in outer.graph.input for size in value.type.tensor_type.shape.dim}
        for size in declared_sizes([*model.graph.input, *model.graph.output, *model.graph.value_info]):
            if size.HasField("dim_param") and size.dim_param not in known:
                size.Clear()
        for name in self.outside:
            constant = outer.constant(name)
            if constant is not None and constant.size <= LARGE:
                model.graph.initializer.append(numpy_helper.from_array(constant, name))
            else:
                model.graph.input.add(name=name).type.CopyFrom(self._type(name))
        for value, kind in zip(model.graph.input, self._given(), strict=False):
            # What the graph around does not tell stays as the body has it.
            declared = value.type.tensor_type
            if kind.WhichOneof("value") is None:
                kind = value.type
            elif kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape") and declared.HasField("shape"):
                sizes = [size.dim_value or None for size in declared.shape.dim]
                kind = helper.make_tensor_type_proto(kind.tensor_type.elem_type, self._all_named(sizes, value.name))
            elif kind.HasField("sequence_type") and not kind.sequence_type.elem_type.tensor_type.HasField("shape"):
                kind = value.type if value.type.HasField("sequence_type") else kind
            value.type.CopyFrom(kind)
        if node.op_type == SCAN:  # whose states have the same shapes before and after each step
            for value, result in zip(model.graph.input[: state_count(node)], model.graph.output, strict=False):
                result.type.CopyFrom(value.type)
        while True:
            self.graph = Graph(copied(model), plain=outer.plain, taken=outer.taken)
            if not self._states_changed(model.graph):
                break

    def restore(self) -> None:
        """Write the graph into the node, as it is in its message."""
        graph, given = copied(self.graph.graph), [copied(each) for each in self.body.input]
        keep(graph.input, given)
        keep(graph.initializer, [each for each in graph.initializer if each.name not in self.outside])
        for size in declared_sizes(graph.value_info):
            if size.dim_param in self.made:
                size.Clear()
        self.body.CopyFrom(graph)

    def declare_results(self) -> bool:
        """Declare the sizes of the last states of a Loop, which onnx does not infer; whether some were not known."""
        if self.node.op_type != LOOP:
            return False
        outer, changed = self.outer, False
        states = self.body.input[FIRST_STATE[LOOP] :]
        for value, name in zip(states, self.node.output, strict=False):
            dtype, tensors = self.graph.element_type(value.name), self.graph.sequence(value.name)
            if dtype and outer.sizes(name) is None and (sizes := self._told(self.graph.sizes(value.name))) is not None:
                outer.declare(name, dtype, sizes)
                changed = True
            inside = self._told(self.graph.sizes_in_sequence(value.name))
            if tensors and inside is not None and outer.sizes_in_sequence(name) is None:
                outer.declare_sequence(name, tensors, inside)
                changed = True
        return changed

    def _told(self, sizes: Sizes | None) -> Sizes | None:
        return None if sizes is None else [None if size in self.made else size for size in sizes]

    def _given(self) -> list[TypeProto]:
        """The types of the body's inputs, as those of the node tell them."""
        node = self.node
        if node.op_type == IF:
            return []
        first, states = FIRST_STATE[node.op_type], state_count(node)
        kinds = [*TURN_AND_CONDITION[:first], *(self._type(name) for name in node.input[first : first + states])]
        for index, name in enumerate(node.input[first + states :]):
            whole, sizes = self._type(name), self.outer.sizes(name)
            if sizes is not None:
                del whole.tensor_type.shape.dim[scan_axis(node, index, "input", len(sizes))]
            kinds.append(whole)
        return kinds

    def _type(self, name: str) -> TypeProto:
        """The type of a value from outside; all of its sizes that are not known have names."""
        dtype = self.outer.element_type(name) if name else None
        if dtype is None:
            inside = self.outer.sequence(name) if name else None
            return TypeProto() if inside is None else sequence_type(inside, self.outer.sizes_in_sequence(name))
        named = self._all_named(self.outer.sizes(name), name)
        self.steady.update(size for size in named or () if isinstance(size, str))
        return helper.make_tensor_type_proto(dtype, named)

    def _all_named(self, sizes: Sizes | None, name: str) -> Sizes | None:
        return None if sizes is None else [self._named(size, name, axis) for axis, size in enumerate(sizes)]

    def _named(self, size: Size, name: str, axis: int) -> Size:
        if isinstance(size, int) or (size and not VAGUE.fullmatch(size)):
            return size
        made = f"{name}:{axis}"
        self.made.add(made)
        return made

    def _states_changed(self, graph: onnx.GraphProto) -> bool:
        """Whether the body changes the sizes of a state, which are then forgotten in `graph`."""
        if self.node.op_type != LOOP:
            return False
        changed, first, found = False, FIRST_STATE[LOOP], self.graph
        results = graph.output[1:]  # behind the condition
        for value, result in zip(graph.input[first : first + state_count(self.node)], results, strict=False):
            changed |= self._filled(value, result.name)
            before, after = found.sizes(value.name), found.sizes(result.name)
            if before is None:
                continue
            joined: Sizes | None = None
            if after is not None and len(before) == len(after):  # a size that differs gets a name of its own
                pairs = enumerate(zip(before, after, strict=True))
                joined = [a if a == b and a is not None else self._named(None, value.name, i) for i, (a, b) in pairs]
            if before != joined:
                value.type.CopyFrom(helper.make_tensor_type_proto(found.element_type(value.name) or 0, joined))
                changed = True
        return changed

    def _filled(self, value: onnx.ValueInfoProto, result: str) -> bool:
        """Declare the sizes of tensors in a sequence that is empty at first, if iterations insert equal ones."""
        found, place = self.graph, [each.name for each in self.body.input].index(value.name)
        kind, first = found.sequence(value.name), self.node.input[place]
        if kind is None or found.sizes_in_sequence(value.name) is not None:
            return False
        inserted, node = list[Sizes | None](), found.maker(result, "SequenceInsert", "Identity")
        while node is not None and result != value.name:
            inserted += [found.sizes(node.input[1])] if node.op_type == "SequenceInsert" else []
            result = node.input[0]
            node = found.maker(result, "SequenceInsert", "Identity")
        ranks = {None if each is None else len(each) for each in inserted}
        if result != value.name or len(ranks) != 1 or None in ranks or self.outer.maker(first, "SequenceEmpty") is None:
            return False
        sizes = [each[0] if len(set(each)) == 1 else None for each in zip(*filter(None, inserted), strict=True)]
        steady = [size if isinstance(size, int) or size in self.steady else None for size in sizes]
        value.type.CopyFrom(sequence_type(kind, steady))
        return True


def declared_sizes(values: Iterable[onnx.ValueInfoProto]) -> Iterator[onnx.TensorShapeProto.Dimension]:
    """The sizes in the types of tensors and of sequences of tensors."""
    for value in values:
        for tensor in (value.type.tensor_type, value.type.sequence_type.elem_type.tensor_type):
            yield from tensor.shape.dim


def in_bodies(graph: Graph, change: Callable[[Graph], Graph | None]) -> None:
    """Change the bodies of all nodes of a graph, each as a graph of its own.

    change: it changes a graph in place, or returns a new one.
    """
    for place in [
        place for place, node in enumerate(graph.nodes()) if node.op_type in (IF, LOOP, SCAN) and not domain_of(node)
    ]:
        node = list(graph.nodes())[place]
        insides = [Enclosed(graph, node, body) for body in subgraphs(node)]
        for inside in insides:
            inside.graph = change(inside.graph) or inside.graph
            inside.graph.commit()
            inside.restore()
        declared = [inside.declare_results() for inside in insides]
        if any(declared):
            graph.refresh()
        else:
            graph.index()


def sequence_type(element_type: int, sizes: Sizes | None = None) -> TypeProto:
    """The type of a sequence of tensors."""
    return helper.make_sequence_type_proto(helper.make_tensor_type_proto(element_type, sizes))


INITIALIZERS_ALONE = 4  # the first version of ONNX's files in which an initializer need not be an input


def hoist(model: onnx.ModelProto) -> None:
    """Move float constants of several elements out of all subgraphs of the main graph, in place.

    Subgraphs read values from outside, so results stay the same, and the constants can be named, trained and exported.
    A name that several subgraphs use becomes one for each of them.
    """
    inner = [graph for node in all_nodes(model.graph.node) for graph in subgraphs(node)]
    if not inner or model.ir_version < INITIALIZERS_ALONE:
        return
    made = Counter[str]()
    for graph in (model.graph, *inner):
        made.update(each.name for each in (*graph.input, *graph.initializer))
        made.update(name for node in graph.node for name in node.output if name)
    taken = set(made)
    for graph in reversed(inner):  # copies of nodes lose what is changed in their subgraphs later
        apart = {each.name for each in (*graph.input, *graph.output)}
        found: dict[str, TensorProto] = {}
        for node in graph.node:
            given = node.attribute[0] if node.op_type == "Constant" and not domain_of(node) and node.attribute else None
            if given is not None and given.name == "value":
                found[node.output[0]] = given.t
        found |= {each.name: each for each in graph.initializer}
        names = set()
        for name, tensor in found.items():
            if name in apart or tensor.data_type not in FLOATS or all(size <= 1 for size in tensor.dims):
                continue
            names.add(name)
            moved = model.graph.initializer.add()
            moved.CopyFrom(tensor)
            moved.name = name if made[name] == 1 else free_name(name, taken)
            if moved.name != name:
                for node in graph.node:
                    rename_inputs(node, {name: moved.name})
        if names:
            keep(graph.node, [node for node in graph.node if names.isdisjoint(node.output)])
            keep(graph.initializer, [each for each in graph.initializer if each.name not in names])


Key = tuple[str, str, str]  # domain, name and overload of a function


def hoist_constants(model: onnx.ModelProto, kept: Iterable[tuple[str, str]]) -> None:
    """Make float constants of functions, of more than one element, initializers that calls hand over, in place.

    kept: domains and names of functions that stay as they are.
    """
    functions = {_key(each): each for each in model.functions if (each.domain, each.name) not in kept}
    own: dict[Key, list[tuple[onnx.NodeProto, TensorProto]]] = {}
    for key, function in functions.items():
        for node in function.node:
            is_constant = node.op_type == "Constant" and not domain_of(node)
            if not is_constant or any(each.ref_attr_name for each in node.attribute):
                continue
            tensor = constant_tensor(node)
            if tensor is not None and tensor.data_type in FLOATS and size_of(tensor) > 1:
                own.setdefault(key, []).append((node, tensor))
    if not own:
        return
    taken = names_in(model.graph).union(*(each.input for each in functions.values()))
    taken.update(name for each in functions.values() for node in all_nodes(each.node) for name in node.output)
    needs: dict[Key, dict[str, None]] = {}
    for key, pairs in own.items():
        for node, tensor in pairs:
            name = free_name(f"{functions[key].name}.{node.output[0]}", taken)
            model.graph.initializer.add().CopyFrom(tensor)
            model.graph.initializer[-1].name = name
            node.op_type, node.input[:] = "Identity", [name]
            del node.attribute[:]
            needs.setdefault(key, {})[name] = None
    counts, calls = {key: len(each.input) for key, each in functions.items()}, dict[Key, list[onnx.NodeProto]]()
    for key, function in functions.items():
        calls[key] = [each for each in all_nodes(function.node) if _called(each) in functions]
    before = None
    while before != (before := sum(map(len, needs.values()))):
        for key, nodes in calls.items():
            for node in nodes:
                needs.setdefault(key, {}).update(needs.get(_called(node), {}))
    for key, names in needs.items():
        functions[key].input.extend(names)
    inside = (node for nodes in calls.values() for node in nodes)
    for node in (*all_nodes(model.graph.node), *inside):
        if names := needs.get(_called(node), {}):
            node.input[:] = [*node.input, *[""] * (counts[_called(node)] - len(node.input)), *names]


def _key(function: onnx.FunctionProto) -> Key:
    return function.domain, function.name, function.overload


def _called(node: onnx.NodeProto) -> Key:
    return node.domain, node.op_type, node.overload

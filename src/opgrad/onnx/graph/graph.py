"""A model as a graph: what is known of its values, which node makes and which nodes read a value, and changes."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference
from onnx.external_data_helper import uses_external_data

from opgrad.base.locks import once
from opgrad.onnx.graph import messages
from opgrad.onnx.graph.inference import Types, infer, infer_part, shapes_given, type_of, unused_number
from opgrad.onnx.graph.nodes import captured, names_in, needed, read_by, rename_inputs
from opgrad.onnx.graph.sizes import Sizes, known, sizes_in

LARGEST_IN_ALL = 1 << 26  # the most bytes of all constants that are computed here, of a graph
AMPLIFIED = 8  # constants that become a part of a graph have at most so many times the bytes of those that it had
FOLDED = messages.names_of(
    """
    Shape Size Gather Concat Unsqueeze Squeeze Slice Cast Add Sub Mul Div Neg Floor Ceil Range ConstantOfShape
    Identity Reshape Min Max Equal Where Transpose Expand Not And Or Less Greater ReduceProd Mod Sqrt Reciprocal Pow
    """
)


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The tensor of a Constant node; None if it is text."""
    attribute = next(iter(node.attribute), onnx.AttributeProto())
    if attribute.name == "value":
        return attribute.t
    kinds: dict[str, Any] = {
        "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64
    }  # fmt: skip
    kind = kinds.get(attribute.name)
    return numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), kind)) if kind else None


def evaluate(node: onnx.NodeProto, inputs: list[np.ndarray], opset: int, most: int) -> list[np.ndarray] | None:
    """The results of a single node of ai.onnx; None if they would take more bytes than `most`, or are not known."""
    # ONNX's reference evaluator and all runtimes give the same result, but for these.
    if node.op_type in ("Div", "Mod") and inputs[0].dtype.kind == "i":
        if not (inputs[1] > 0).all() or not (inputs[0] >= 0).all():
            return None  # quotients below 0 are rounded differently
    elif node.op_type in ("Cast", "CastLike") and inputs[0].dtype.kind not in "iub":
        to_float = any(each.name == "to" and each.i in messages.FLOATS for each in node.attribute)
        if not to_float and not np.isfinite(inputs[0].astype(np.float64)).all():
            return None  # the integer for NaN or infinity is not defined
    places = map(str, range(len(inputs)))
    names = [next(places) if name else "" for name in node.input]
    outputs = [name and f"y{index}" for index, name in enumerate(node.output)]
    alone = helper.make_node(node.op_type, names, outputs)
    alone.attribute.extend(node.attribute)
    tensors = [numpy_helper.from_array(each, str(index)) for index, each in enumerate(inputs)]
    declared = [onnx.ValueInfoProto(name=name) for name in outputs if name]
    graph = helper.make_graph([alone], "node", [], declared, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    found = _small_results(model.SerializeToString()) if model.ByteSize() <= SMALL <= most else None
    return _results(model, most) if found is None else found


SMALL = 1 << 11  # bytes of a node with what it reads, and of what it gives


@functools.lru_cache(1024)
def _small_results(text: bytes) -> list[np.ndarray] | None:
    """The small results of a small node, which the layers of a model have in common."""
    return _results(onnx.load_from_string(text), SMALL)


def _results(model: onnx.ModelProto, most: int) -> list[np.ndarray] | None:
    """Those of a model of one node without inputs.

    The sizes of the results are inferred first, as a node of a few bytes can ask for any memory.
    """
    from onnx.reference import ReferenceEvaluator

    try:
        inferred = [each.type.tensor_type for each in shape_inference.infer_shapes(model).graph.output]
        for each in inferred:
            sizes = known(sizes_in(each))
            if sizes is None or not each.elem_type:
                return None
            most -= math.prod(sizes) * helper.tensor_dtype_to_np_dtype(each.elem_type).itemsize
        if most < 0:
            return None
        with np.errstate(all="ignore"):
            return [np.asarray(each) for each in ReferenceEvaluator(model).run(None, {})]
    except Exception:  # the node is wrong or the evaluator lacks the type; whatever runs the model reports an error
        return None


OVERRIDABLE_FROM = 4  # from this version of the format on an initializer is a constant unless it is an input, too


def overridable(model: onnx.ModelProto) -> frozenset[str]:
    """The names of initializers that are defaults of inputs, which callers may override, and no constants."""
    given = {each.name for each in model.graph.input} if model.ir_version >= OVERRIDABLE_FROM else set()
    return frozenset(given)


class Graph:
    """A model that the graph owns.

    variable: the names of initializers that do not count as constants because they will be trained.
    keep: names that stay, beside those of inputs and outputs. plain: whether all nodes have to be of ai.onnx.
    taken: the names of the graphs around this one and inside of it, to which new names are added; None if it is alone.
    known: a graph with values of the same names, whose types are taken over; None: all types are inferred.

    Types are inferred once, when one is asked for. `refresh` then infers those of the results of nodes that are new,
    and of nodes whose inputs have other types than before.

    graph: the message. Its nodes may be changed in place, and `refresh` reads them again; what `substitute`, `alias`
    and `reorder` change is in the message after `commit`.
    room: the bytes that constants which passes compute may still have in all, without small ones.
    kept: all names that stay.
    most_read, most_folded: the most bytes of all inputs of a node whose result is computed here, and of that.
    """

    most_read: float
    most_folded: int
    most_read = most_folded = 1 << 19

    def __init__(
        self, model: onnx.ModelProto, variable: Iterable[str] = (), keep: Iterable[str] = (), plain: bool = False,
        taken: set[str] | None = None, known: "Graph | None" = None,
    ):  # fmt: skip
        self.model, self.graph, self.plain = model, model.graph, plain
        self.opset, self.variable = messages.opset_of(model), frozenset(variable)
        self.room = AMPLIFIED * sum(each.ByteSize() for each in self.graph.initializer)
        self._left: float = LARGEST_IN_ALL
        self._given = {each.name for each in self.graph.input}
        self.outputs = frozenset(each.name for each in self.graph.output)
        self.kept = frozenset(keep) | self._given | self.outputs
        if taken is not None:
            self.__dict__["taken"] = taken
        self._inferred: Types | None = None  # when a type is asked for
        self._sequences: Types = {}  # likewise, the types of the tensors in sequences
        self._unused = 0  # the first number for a name that is made up for a size
        self._settled: set[str] = set()  # the names of results whose types were inferred from what their nodes read
        self._folded: dict[str, np.ndarray | None] = {}
        self._read()
        if known is not None:
            self._take_types(known)

    def again(self, variable: Iterable[str] = (), keep: Iterable[str] = (), plain: bool = False) -> "Graph":
        """The same model as another graph, with these settings and the types that are known. This one is used up."""
        self.write_nodes()
        return Graph(self.model, variable, keep, plain, known=self)

    def copy(self) -> "Graph":
        """A copy, of the model, too, with the types that are known."""
        self.write_nodes()
        return Graph(messages.copied(self.model), self.variable, self.kept, self.plain, known=self)

    @once
    def taken(self) -> set[str]:
        """The names that no new value or node may have."""
        return self.names()

    def refresh(self) -> None:
        """Write the nodes into the model, and read the model again."""
        self.write_nodes()
        self._import()
        self._read()

    def _read(self) -> None:
        self._slots = [[node] for node in self.graph.node]
        self.initializers = {each.name: each for each in self.graph.initializer}
        self.quantized: set[str] | None = None  # see expansion.quantized
        self.index()
        self._is_current = False  # whether the types are those of all nodes
        self._folded = {name: value for name, value in self._folded.items() if value is not None}

    def index(self) -> None:
        """Find the maker and the readers of each value anew, when they are asked for."""
        self.__dict__.pop("_links", None)

    @once
    def _links(self) -> "tuple[dict[int, int], dict[str, onnx.NodeProto], dict[str, list[onnx.NodeProto]]]":
        """The index of each node's slot, the maker of each value, and its readers."""
        producers = {name: node for node in self.nodes() for name in node.output if name}
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes():
            for name in dict.fromkeys(captured(node)):
                readers.setdefault(name, []).append(node)
        return {id(node): index for index, slot in enumerate(self._slots) for node in slot}, producers, readers

    @property
    def producers(self) -> dict[str, onnx.NodeProto]:
        """By the name of a value, the node that makes it."""
        return self._links[1]

    @property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        """By the name of a value, the nodes that read it, each once."""
        return self._links[2]

    def nodes(self) -> Iterator[onnx.NodeProto]:
        """All nodes, in their order."""
        return itertools.chain.from_iterable(self._slots)

    @property
    def _types(self) -> Types:
        if self._inferred is None:
            self.infer()
        elif not self._is_current:
            self._infer_new()
        return self._inferred or {}

    def infer(self) -> None:
        """Infer the types of all values, from what the model declares and from what is known of them already."""
        if self._inferred is not None:
            self.commit()
        self._is_current = True
        self._inferred, self._sequences = infer(self.model, self._known_shapes)
        self._unused = unused_number(self._inferred)
        self._folded = {name: value for name, value in self._folded.items() if value is not None}
        self._settled = {name for node in self.graph.node for name in node.output}

    def _infer_new(self) -> None:
        """Infer the types of results that are new, and then of those that depend on types which changed."""
        self._is_current = True
        order = list(self.nodes())
        waiting = [node for node in order if not self._settled.issuperset(node.output)]
        while waiting:
            self._settled.update(*(node.output for node in waiting))
            known, inside = dict(self._inferred or {}), self._sequences
            given = order, self.producers, waiting, self.initializers, known, inside, self._unused
            found, sequences = infer_part(self.model, self._known_shapes, *given)
            self._inferred, self._sequences = known | found, inside | sequences
            self._unused = max(self._unused, unused_number(found))
            changed = {name for name, each in found.items() if known.get(name) != each}
            changed |= {name for name, each in sequences.items() if inside.get(name) != each}
            readers = {id(node) for name in changed for node in self.readers.get(name, ())}
            readers -= {id(node) for node in waiting}
            waiting = [node for node in order if id(node) in readers]
        self._folded = {name: value for name, value in self._folded.items() if value is not None}

    def _take_types(self, known: "Graph") -> None:
        """Take over what another graph knows of values of the same names, and what the message declares of others."""
        if known._inferred is None:
            return
        self._inferred, self._sequences, self._settled = {**known._inferred}, {**known._sequences}, {*known._settled}
        declared = (*self.graph.input, *self.graph.output, *self.graph.value_info)
        others = (each for each in declared if each.name not in known._inferred and each.type.HasField("tensor_type"))
        own = {each.name: messages.copied(each.type.tensor_type) for each in others}
        self._inferred |= own
        self._unused = max(known._unused, unused_number(own))
        new = self.initializers.keys() - known.initializers.keys()
        self._inferred |= {name: type_of(self.initializers[name]) for name in new}
        self._settled.difference_update(*(node.output for name in new for node in self.readers.get(name, ())))
        self._is_current = False

    def _known_shapes(self, types: Types, nodes: Iterable[onnx.NodeProto]) -> dict[str, np.ndarray]:
        """The constants among the `shapes_given` of some nodes, by name. types: the types of all values."""
        self._inferred = types
        asked = {name for node in nodes for name in shapes_given(node)} - self.initializers.keys()
        found = {name: self.constant(name) for name in asked}
        return {name: value for name, value in found.items() if value is not None and value.size <= messages.LARGE}

    def names(self) -> set[str]:
        """Every name of the graph, those of values and those of nodes."""
        return names_in(self.graph)

    def element_type(self, name: str) -> int | None:
        """The TensorProto.DataType of a value, None if it is not known."""
        known = self._types.get(name)
        return known.elem_type or None if known is not None else None

    def sizes(self, name: str) -> Sizes | None:
        """For each axis an int, a name, or None if its size is unknown; None for the whole if the rank is unknown."""
        return sizes_in(self._types.get(name))

    def sequence(self, name: str) -> int | None:
        """The TensorProto.DataType of the tensors in a sequence; None for another value, or where it is not known."""
        found = self._sequences.get(name) if self._types is not None else None
        return None if found is None else found.elem_type

    def sizes_in_sequence(self, name: str) -> Sizes | None:
        """The sizes of each tensor in a sequence, as of `sizes`."""
        return sizes_in(self._sequences.get(name) if self._types is not None else None)

    def declare_sequence(self, name: str, element_type: int, sizes: Sizes | None = None) -> None:
        """Record that a value is a sequence of tensors, and their type and sizes."""
        if self._types is not None:
            self._sequences[name] = helper.make_tensor_type_proto(element_type, sizes).tensor_type

    def declare(self, name: str, element_type: int, sizes: Sizes | None) -> None:
        """Record type and sizes of a value that was added to the graph."""
        self._types[name] = helper.make_tensor_type_proto(element_type, sizes).tensor_type

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a tensor that is the same in every run; None if it varies, or takes much memory to compute."""
        if name not in self._folded:
            self._folded[name] = None  # ends the recursion in a damaged model whose nodes form a circle
            self._folded[name] = self._constant(name)
        return self._folded[name]

    def _constant(self, name: str) -> np.ndarray | None:
        if name in self.variable:
            return None
        if name in self.initializers:
            tensor = self.initializers[name]
            return None if uses_external_data(tensor) else numpy_helper.to_array(tensor)
        node = self.producers.get(name)
        if node is None or messages.domain_of(node):
            return None
        if node.op_type == "Constant":
            tensor = constant_tensor(node)
            return None if tensor is None else numpy_helper.to_array(tensor)
        return self._fold(node) if self.folds(node) else None

    def folds(self, node: onnx.NodeProto) -> bool:
        """Whether the result of a node is computed here, if all that it reads is known."""
        return node.op_type in FOLDED

    def _fold(self, node: onnx.NodeProto) -> np.ndarray | None:
        if node.op_type == "Shape":
            whole = self._shape(node)
            return None if whole is None or whole.min(initial=0) < 0 else whole
        if node.op_type == "Size":
            sizes = known(self.sizes(node.input[0]))
            count = math.inf if sizes is None else math.prod(sizes)
            return np.array(count, np.int64) if count <= np.iinfo(np.int64).max else None
        inputs, shape = list[np.ndarray](), None
        for name in filter(None, node.input):
            value = self.constant(name)
            if value is None and not inputs and node.op_type in ("Gather", "Slice"):
                shape = self.producers.get(name)
                value = None if shape is None else self._shape(shape)
            if value is None:
                return None
            inputs.append(value)
        if sum(value.nbytes for value in inputs) > self.most_read:
            return None
        gathers = shape is not None and node.op_type == "Gather" and inputs[0].size and inputs[1].dtype.kind == "i"
        if gathers and inputs[0].take(inputs[1], mode="wrap").min(initial=0) < 0:
            return None  # it takes a size that is not known
        results = evaluate(node, inputs, self.opset, int(min(self.most_folded, self._left)))
        if results is None or (shape is not None and results[0].min(initial=0) < 0):
            return None
        self._left -= sum(each.nbytes for each in results)
        return results[0]

    def _shape(self, node: onnx.NodeProto) -> np.ndarray | None:
        """The result of a Shape node, with -1 for sizes that are not known; None for another node or an open rank."""
        sizes = self.sizes(node.input[0]) if node.op_type == "Shape" and not messages.domain_of(node) else None
        if sizes is None:
            return None
        given = {each.name: each.i for each in node.attribute}
        part = sizes[given.get("start", 0) : given.get("end", len(sizes))]
        return np.array([each if isinstance(each, int) else -1 for each in part], np.int64)

    def before(self, name: str) -> set[str]:
        """The values on which one depends, itself included."""
        return {name, *read_by(needed(list(self.nodes()), [name]))}

    def maker(self, name: str, *operators: str) -> onnx.NodeProto | None:
        """The node whose first result a value is, if it is of ai.onnx and of one of these operators; else None."""
        node = self.producers.get(name)
        if node is None or messages.domain_of(node) or node.op_type not in operators or node.output[0] != name:
            return None
        return node

    def part(self, name: str, *operators: str) -> onnx.NodeProto | None:
        """The `maker` of a value that one node reads and that is not kept; else None."""
        return self.maker(name, *operators) if self.inner(name) else None

    def inner(self, name: str, readers: int = 1) -> bool:
        """Whether exactly so many nodes read a value, and it is no output or other kept value."""
        return name not in self.kept and len(self.readers.get(name, ())) == readers

    def reader(self, name: str, *operators: str) -> onnx.NodeProto | None:
        """The only node that reads a value, if it is of ai.onnx and of one of these operators; else None."""
        if not self.inner(name):
            return None
        (node,) = self.readers[name]
        return node if not messages.domain_of(node) and node.op_type in operators else None

    def scalar(self, name: str) -> float | None:
        """The number in a constant of one element and at most one axis; None for any other value."""
        value = self.constant(name) if name else None
        return float(value.reshape(())) if value is not None and value.size == 1 and value.ndim <= 1 else None

    def known(self, name: str) -> list[int] | None:
        """The sizes of a value if all are numbers, else None."""
        return known(self.sizes(name))

    def free(self, name: str) -> str:
        """A name that is not taken yet; from now on it is."""
        return messages.free_name(name, self.taken)

    def node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> onnx.NodeProto:
        """A new node with a name that no other node has, for `substitute`."""
        name = self.free(f"{outputs[0]}/{op}")
        return helper.make_node(op, inputs, outputs, name, domain=domain, **attributes)

    def add_constant(self, array: np.ndarray, name: str) -> str:
        """Add an initializer; its name is `name`, changed if that is taken."""
        return self.add_initializer(numpy_helper.from_array(array, self.free(name)))

    def become_constants(self, node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> None:
        """Replace a node by initializers with the names of its results."""
        self.substitute(node, [])
        for name, tensor in tensors.items():
            self.add_initializer(tensor, name)
        if node.op_type != "Constant":
            self._settled.difference_update(*(each.output for name in tensors for each in self.readers.get(name, ())))

    def add_initializer(self, tensor: onnx.TensorProto, name: str = "") -> str:
        """Add a copy of a tensor of this name, or its own, which no other value has; the name."""
        named = self.graph.initializer.add()
        named.CopyFrom(tensor)
        named.name = name or tensor.name
        self.initializers[named.name] = named
        self._folded.pop(named.name, None)
        self.declare(named.name, named.data_type, list(named.dims))
        return named.name

    def substitute(self, node: onnx.NodeProto, others: Sequence[onnx.NodeProto]) -> None:
        """Replace a node by others, which have to make all of its results that something reads."""
        self._settled.difference_update(node.output)
        places = self._links[0]
        place = places.pop(id(node))
        where = next(index for index, each in enumerate(self._slots[place]) if each is node)
        self._slots[place][where : where + 1] = others
        for name in dict.fromkeys(captured(node)):
            self.readers[name] = [each for each in self.readers[name] if each is not node]
        for name in node.output:
            if self.producers.get(name) is node:
                del self.producers[name]
        for each in others:
            places[id(each)] = place
            self.producers.update({name: each for name in each.output if name})
            for name in dict.fromkeys(captured(each)):
                self.readers.setdefault(name, []).append(each)

    def alias(self, name: str, by: str) -> bool:
        """Let whatever reads one value read an equal one; False if a name that must stay forbids it.

        The node that makes the value stays until nothing needs it.
        """
        if name not in self.kept:
            self._redirect(name, by)
            return True
        maker = self.producers.get(by)
        if by in self.kept or maker is None or name not in self.producers:
            return False
        old = self.producers[name]
        if any(each != name for each in old.output if each):
            return False
        self.substitute(old, [])
        self._redirect(by, name)
        maker.output[:] = [name if each == by else each for each in maker.output]
        del self.producers[by]
        self.producers[name] = maker
        return True

    def _redirect(self, name: str, by: str) -> None:
        for node in self.readers.pop(name, []):
            if by not in captured(node):
                self.readers.setdefault(by, []).append(node)
            rename_inputs(node, {name: by})

    def reorder(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Put all nodes into this order, in which there may be new ones."""
        self._slots = [[node] for node in nodes]
        self.index()

    def declare_like(self, name: str, other: str) -> None:
        """Declare that an added value has the type and sizes of another one."""
        dtype = self.element_type(other)
        if dtype is not None:
            self.declare(name, dtype, self.sizes(other))

    def write_nodes(self) -> None:
        """Write the nodes into the model, but no types of values that were added."""
        nodes = list(self.nodes())
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    def commit(self) -> None:
        """Write nodes and types into the model; types of values that no longer exist are left out."""
        self.write_nodes()
        graph = self.graph
        declared = {each.name for each in (*graph.input, *graph.output)}
        made = [name for node in graph.node for name in node.output if name and name not in declared]
        infos = []
        for name in made:
            dtype, inside = self.element_type(name), self.sequence(name)
            if dtype is not None:
                infos.append(helper.make_tensor_value_info(name, dtype, self.sizes(name)))
            elif inside is not None:
                infos.append(helper.make_tensor_sequence_value_info(name, inside, self.sizes_in_sequence(name)))
        own = {each.name for each in infos}
        others = [messages.copied(each) for each in graph.value_info if not each.type.HasField("tensor_type")]
        del graph.value_info[:]
        graph.value_info.extend([*infos, *(each for each in others if each.name in made and each.name not in own)])
        self._import()

    def _import(self) -> None:
        """Let the model import what its nodes are of, and be of a version in which initializers need not be inputs."""
        if any(node.domain == messages.MICROSOFT for node in self.graph.node):
            messages.import_microsoft(self.model)
        if any(each.name not in self._given for each in self.graph.initializer):
            self.model.ir_version = max(self.model.ir_version, OVERRIDABLE_FROM)

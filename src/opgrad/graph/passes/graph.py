"""The graph that passes change: it knows which node makes a value and which nodes read it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from opgrad.graph.forward import Forward
from opgrad.graph.messages import MICROSOFT, copied, domain_of, free_name, import_microsoft
from opgrad.graph.nodes import attributes_of, captured, rename_inputs
from opgrad.graph.sizes import known

OVERRIDABLE_FROM = 4  # from this version of the format on an initializer is a constant unless it is an input, too


class Graph(Forward):
    """A model that the graph owns and whose nodes are changed one by one.

    keep: names that stay, beside those of the graph's inputs and outputs. variable: initializers that will be trained;
    they do not count as constants and stay, too. plain: whether all nodes have to be of ai.onnx.

    readers: by the name of a value, the nodes that read it, each once.
    """

    def __init__(
        self, model: onnx.ModelProto, keep: Iterable[str] = (), variable: Iterable[str] = (), plain: bool = False
    ):
        variable = frozenset(variable)
        given = self._given = {each.name for each in model.graph.input}
        self.plain, self.outputs = plain, frozenset(each.name for each in model.graph.output)
        self.kept = frozenset(keep) | variable | given | self.outputs
        overridable = given if model.ir_version >= OVERRIDABLE_FROM else frozenset()
        self._slots = [[copied(node)] for node in model.graph.node]
        super().__init__(model, variable | overridable)
        self._taken = self.names()

    def refresh(self) -> None:
        """Write the nodes into the model, and read the model again."""
        if hasattr(self, "_types"):
            self.commit()
        super().refresh()
        self.index()

    def index(self) -> None:
        """Find the maker and the readers of each value."""
        self._places = {id(node): place for place, slot in enumerate(self._slots) for node in slot}
        self.producers = {name: node for node in self.nodes() for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes():
            for name in dict.fromkeys(captured(node)):
                self.readers.setdefault(name, []).append(node)

    def nodes(self) -> Iterator[onnx.NodeProto]:
        """All nodes, in their order."""
        return (node for slot in self._slots for node in slot)

    # --- questions ---

    def maker(self, name: str, *operators: str) -> onnx.NodeProto | None:
        """The node whose first result a value is, if it is of ai.onnx and of one of these operators; else None."""
        node = self.producers.get(name)
        if node is None or domain_of(node) or node.op_type not in operators or node.output[0] != name:
            return None
        return node

    def inner(self, name: str, readers: int = 1) -> bool:
        """Whether exactly so many nodes read a value, and it is no output or other kept value."""
        return name not in self.kept and len(self.readers.get(name, ())) == readers

    def reader(self, name: str, *operators: str) -> onnx.NodeProto | None:
        """The only node that reads a value, if it is of ai.onnx and of one of these operators; else None."""
        if not self.inner(name):
            return None
        (node,) = self.readers[name]
        return node if not domain_of(node) and node.op_type in operators else None

    def scalar(self, name: str) -> float | None:
        """The number in a constant of one element and at most one axis; None for any other value."""
        value = self.constant(name) if name else None
        return float(value.reshape(())) if value is not None and value.size == 1 and value.ndim <= 1 else None

    def known(self, name: str) -> list[int] | None:
        """The sizes of a value if all are numbers, else None."""
        return known(self.sizes(name))

    def attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        """The attributes of a node by their names, text decoded."""
        return attributes_of(node)

    # --- changes ---

    def free(self, name: str) -> str:
        """A name that is not taken yet; from now on it is."""
        return free_name(name, self._taken)

    def node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> onnx.NodeProto:
        """A new node with a name that no other node has, for `substitute`."""
        name = self.free(f"{outputs[0]}/{op}")
        return helper.make_node(op, inputs, outputs, name, domain=domain, **attributes)

    def add_constant(self, array: np.ndarray, name: str) -> str:
        """Add an initializer; its name is `name`, changed if that is taken."""
        return self._add(numpy_helper.from_array(array, self.free(name)))

    def become_constants(self, node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> None:
        """Replace a node by initializers with the names of its results."""
        self.substitute(node, [])
        for name, tensor in tensors.items():
            tensor.name = name
            self._add(tensor)

    def _add(self, tensor: onnx.TensorProto) -> str:
        named = self.graph.initializer.add()
        named.CopyFrom(tensor)
        self.initializers[named.name] = named
        self._folded.pop(named.name, None)
        self.declare(named.name, named.data_type, list(named.dims))
        return named.name

    def substitute(self, node: onnx.NodeProto, others: Sequence[onnx.NodeProto]) -> None:
        """Replace a node by others, which have to make all of its results that something reads."""
        place = self._places.pop(id(node))
        where = next(index for index, each in enumerate(self._slots[place]) if each is node)
        self._slots[place][where : where + 1] = others
        for name in dict.fromkeys(captured(node)):
            self.readers[name] = [each for each in self.readers[name] if each is not node]
        for name in node.output:
            if self.producers.get(name) is node:
                del self.producers[name]
        for each in others:
            self._enter(each, place)

    def _enter(self, node: onnx.NodeProto, place: int) -> None:
        self._places[id(node)] = place
        self.producers |= {name: node for name in node.output if name}
        for name in dict.fromkeys(captured(node)):
            self.readers.setdefault(name, []).append(node)

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
            rename_inputs(node, {name: by})
            others = self.readers.setdefault(by, [])
            if all(each is not node for each in others):
                others.append(node)

    def reorder(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Put all nodes into this order, in which there may be new ones."""
        self._slots = [[node] for node in nodes]
        self.index()

    def declare_like(self, name: str, other: str) -> None:
        """Declare that an added value has the type and sizes of another one."""
        kind = self.element_type(other)
        if kind is not None:
            self.declare(name, kind, self.sizes(other))

    # --- the model ---

    def _info(self, name: str, kind: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, self.sizes(name))

    def commit(self) -> None:
        """Write nodes and types into the model; types of values that no longer exist are left out."""
        graph = self.graph
        del graph.node[:]
        graph.node.extend(self.nodes())
        told = {each.name for each in (*graph.input, *graph.output)}
        made = [name for node in graph.node for name in node.output if name and name not in told]
        infos = [self._info(name, kind) for name in made if (kind := self.element_type(name)) is not None]
        others = [copied(each) for each in graph.value_info if not each.type.HasField("tensor_type")]
        del graph.value_info[:]
        graph.value_info.extend([*infos, *(each for each in others if each.name in made)])
        domains = {node.domain for node in graph.node}
        if MICROSOFT in domains:
            import_microsoft(self.model)
        if any(each.name not in self._given for each in graph.initializer):
            self.model.ir_version = max(self.model.ir_version, OVERRIDABLE_FROM)

"""Unpacks parameters from the inputs of a layout in a graph, and packs their new values into the outputs."""

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.messages import FEW_BITS, keep, opset_of
from opgrad.onnx.graph.nodes import names_in, rename_inputs
from opgrad.training.export.constants import Constants
from opgrad.training.export.layout import PARAMETERS, STATISTICS, Carried, StateLayout, StateTensor
from opgrad.training.make.outputs import inputs_as_constants

FLOAT = TensorProto.FLOAT


def bake(graph: onnx.GraphProto, frozen: Constants) -> None:
    """Turn the inputs that are frozen parameters or large constants into initializers."""
    given = [each for each in graph.input if each.name in frozen.arrays]
    inputs_as_constants(graph, [_initializer(each, frozen) for each in given])


def _initializer(value: onnx.ValueInfoProto, frozen: Constants) -> TensorProto:
    """The initializer in the place of an input. Arrays of integers of a few bits are their bytes."""
    kind = value.type.tensor_type
    if kind.elem_type not in FEW_BITS:
        return frozen.tensor(value.name)
    sizes = [axis.dim_value for axis in kind.shape.dim]
    return frozen.part(value.name, value.name, kind.elem_type, sizes, 0, frozen.arrays[value.name].nbytes)


class Packing:
    """A graph that takes its parameters from the inputs of a layout.

    model: changed; nodes and initializers are added when `finish` is called, those of unpacking at the front.
    layout: that of the state. body: where nodes behind the graph's own ones are written.
    """

    def __init__(self, model: onnx.ModelProto, layout: StateLayout):
        self.model, self.layout = model, layout
        self.body = GraphBody(opset_of(model), names_in(model.graph))
        self._given: dict[str, Value] = {}
        self._new: dict[StateTensor, tuple[Sequence[StateTensor], Value]] = {}
        self._unpack()

    # --- inputs ---

    def scalar(self, name: str, element_type: int) -> Value:
        """A new input of shape [1], as a value of shape ()."""
        self._claim(name)
        self.model.graph.input.append(helper.make_tensor_value_info(name, element_type, [1]))
        shaped = Value(self.body, name, element_type, [1]).reshape([])
        return Value(self.body, shaped.name, element_type, [])

    def _claim(self, name: str) -> None:
        """Reserve a name that an input or output of the step must have. Raises ValueError if the graph has it."""
        if self.body.free(name) != name:
            raise ValueError(f"export_step: the graph has a value {name!r}, which is the name of an input of the step")

    def section(self, tensors: Sequence[StateTensor]) -> Value:
        """The values of consecutive tensors in an input, in float32."""
        part = next(each for each in self.layout.parts if tensors[0] in each.tensors)
        whole = self._take(part)
        if len(tensors) == len(part.tensors):
            return whole
        first = part.tensors.index(tensors[0])
        start = sum(each.size for each in part.tensors[:first])
        found = whole.slice(start, start + sum(each.size for each in tensors))
        return Value(self.body, found.name, FLOAT, None)

    def _take(self, part: Carried) -> Value:
        """An input in float32; it is added to the graph when it is first used."""
        if part.input not in self._given:
            if part.kind not in (PARAMETERS, STATISTICS) or part.input != part.tensors[0].name:
                self._claim(part.input)
            self.model.graph.input.append(part.value())
            self._given[part.input] = Value(self.body, part.input, part.element_type, list(part.shape))
        given = self._given[part.input]
        return given if part.element_type == FLOAT else given.cast(FLOAT)

    def _unpack(self) -> None:
        graph = self.model.graph
        weights = {each.name for each in self.layout.weights}
        types = {each.name: each.type.tensor_type.elem_type for each in graph.input if each.name in weights}
        keep(graph.input, [each for each in graph.input if each.name not in types])
        self.body.scope("unpack")
        for part in self.layout.parts:
            if part.kind in (PARAMETERS, STATISTICS) and any(each.name in types for each in part.tensors):
                self._unpack_part(part, types)
        nodes = [*self.body.nodes, *graph.node]
        keep(graph.node, nodes)
        self.body.nodes = []

    def _unpack_part(self, part: Carried, types: Mapping[str, int]) -> None:
        whole = self._take(part)
        if part.input == part.tensors[0].name:  # the graph reads the input itself
            typed = _typed(whole, types[part.input])
            if typed.name != part.input:
                for node in self.model.graph.node:
                    rename_inputs(node, {part.input: typed.name})
            return
        for tensor, piece in zip(part.tensors, self._pieces(whole, part.tensors), strict=True):
            if tensor.name in types:
                shape = self.body.ints(tensor.shape)
                node = helper.make_node("Reshape", [_typed(piece, types[tensor.name]).name, shape.name], [tensor.name])
                self.body.nodes.append(node)

    def _pieces(self, whole: Value, tensors: Sequence[StateTensor]) -> list[Value]:
        """The tensors of a flat array, each flat itself."""
        if len(tensors) == 1:
            return [whole]
        sizes = self.body.ints([each.size for each in tensors])
        return self.body.nodes_of("Split", len(tensors), whole, sizes, axis=0)

    # --- outputs ---

    def put(self, tensors: Sequence[StateTensor], value: Value) -> None:
        """Set the new value of consecutive tensors in an input."""
        self._new[tensors[0]] = (tensors, value)

    def output(self, name: str, value: Value, kind: onnx.TypeProto | None) -> str:
        """Turn a value into an output; returns its name, which is changed if the name is taken."""
        if name != value.name:
            name = self.body.free(name)
            self.body.nodes.append(helper.make_node("Identity", [value.name], [name]))
        self.model.graph.output.append(onnx.ValueInfoProto(name=name, type=kind))
        return name

    def put_out(self) -> None:
        """Turn the new values of all inputs into outputs."""
        for part in self.layout.parts:
            pieces: list[Value] = []
            taken = 0
            while taken < len(part.tensors):
                tensors, value = self._new[part.tensors[taken]]
                pieces.append(value)
                taken += len(tensors)
            whole = pieces[0] if len(pieces) == 1 else self.joined(pieces)
            self.output(part.output, _typed(whole, part.element_type), part.value().type)

    def joined(self, values: Sequence[Value]) -> Value:
        """All elements of values of one type behind each other."""
        flat = [each.reshape([-1]) for each in values]
        return flat[0] if len(flat) == 1 else self.body.concat(*flat)

    def finish(self) -> None:
        """Add what was written to the graph."""
        graph = self.model.graph
        graph.node.extend(self.body.nodes)
        graph.initializer.extend(self.body.initializers)
        del graph.value_info[:]  # runtimes infer it, and after lowering to functions some of it is wrong


def _typed(value: Value, element_type: int) -> Value:
    return value if value.element_type == element_type else value.cast(element_type)

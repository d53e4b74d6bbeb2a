"""Puts adapters into a model: nodes beside products, whose factors are initializers of the model."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.messages import MICROSOFT, free_name, keep
from opgrad.onnx.graph.nodes import attributes_of, names_in, rename, rename_inputs
from opgrad.tune.dora import bias_of
from opgrad.tune.language.model import WHO
from opgrad.tune.lora import Adapter

DRAW = "draw"  # an input, int64 [1]


class _AdapterWriter:
    """Appends the nodes of adapters to a graph. scaled, seed, drawn: see `insert`."""

    def __init__(self, graph: onnx.GraphProto, scaled: bool, seed: int | None, drawn: bool):
        self.graph, self._scaled, self._seed, self._drawn = graph, scaled, seed, drawn
        self._taken = names_in(graph)
        self.nodes: list[onnx.NodeProto] = []

    def free(self, name: str) -> str:
        """A name that nothing in the graph has: this one, or one that begins with it."""
        return free_name(name, self._taken)

    def add(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Append a node; returns the name of its result."""
        name = self.free(output)
        self.nodes.append(helper.make_node(op, inputs, [name], self.free(f"{name}/{op}"), **attributes))
        return name

    def constant(self, value: np.ndarray, name: str) -> str:
        """Add an initializer."""
        name = self.free(name)
        self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def addend(self, adapter: Adapter, node: onnx.NodeProto) -> str:
        """What an adapter adds to the result of its product's node."""
        name, x = adapter.name, adapter.product.input
        op = "Conv" if adapter.product.op == "Conv" else "MatMul"
        if self._seed is not None and adapter.lora.dropout and not adapter.is_table:
            x = self._dropout(x, adapter, self._seed)
        if adapter.is_table:
            low = self.add("Gather", [adapter.a, x], f"{name}.lora_A")
        else:
            low = self.add(op, [x, adapter.a], f"{name}.lora_A", **(attributes_of(node) if op == "Conv" else {}))
        if not self._scaled and adapter.lora.scale != 1:
            scale = self.constant(np.array(adapter.lora.scale, np.float32), f"{name}.lora_scale")
            low = self.add("Mul", [low, scale], f"{name}.lora_A.scaled")
        return self.add(op, [low, adapter.b], f"{name}.lora_B")

    def adapted(self, adapter: Adapter, node: onnx.NodeProto, part: str, name: str) -> str:
        """What an adapter makes of the columns of a product's result to which it adds."""
        low = self.addend(adapter, node)
        if not adapter.lora.dora:
            return self.add("Add", [part, low], name)
        bias = bias_of(node)
        if bias and adapter.outputs != adapter.product.outputs:
            bias = self._slice(bias, adapter, -1)
        if bias:
            part = self.add("Sub", [part, bias], f"{adapter.name}.lora_plain")
        whole = self.add("Add", [part, low], f"{adapter.name}.lora_whole")
        factor = adapter.magnitude if self._scaled else self._factor(adapter, node)
        y = self.add("Mul", [whole, factor], name if not bias else f"{adapter.name}.lora_turned")
        return self.add("Add", [y, bias], name) if bias else y

    def _factor(self, adapter: Adapter, node: onnx.NodeProto) -> str:
        """The lengths of columns over the norms that they have; see `dora`."""
        name = f"{adapter.name}.lora_norm"
        turned = self.add("Transpose", [adapter.a], f"{name}.turned", perm=[1, 0])
        crossed = self._product(turned, node, f"{name}.crossed")
        if adapter.outputs != adapter.product.outputs:
            crossed = self._slice(crossed, adapter, 1)
        scale = self.constant(np.array(adapter.lora.scale, np.float32), f"{name}.scale")
        own = self.add("MatMul", [self.add("MatMul", [turned, adapter.a], f"{name}.gram"), adapter.b], f"{name}.own")
        twice = self.add("Add", [crossed, crossed], f"{name}.twice")
        terms = self.add("Add", [self.add("Mul", [own, scale], f"{name}.own.scaled"), twice], f"{name}.terms")
        first = self.constant(np.array([0]), f"{name}.axis")
        total = self.add("ReduceSum", [self.add("Mul", [adapter.b, terms], f"{name}.products"), first], f"{name}.sum",
                         keepdims=0)  # fmt: skip
        assert adapter.norms is not None
        norms = self.constant(adapter.norms.astype(np.float32), f"{name}.base")
        square = self.add("Add", [self.add("Mul", [total, scale], f"{name}.sum.scaled"), norms], f"{name}.square")
        norm = self.add("StopGradient", [self.add("Sqrt", [square], name)], f"{name}.held", domain=MICROSOFT)
        return self.add("Div", [adapter.magnitude, norm], f"{name}.factor")

    def _product(self, rows: str, node: onnx.NodeProto, name: str) -> str:
        """The product of rows and the weight of a product's node, without its bias."""
        inputs = [rows, *node.input[1 : facts_of(node).bias]]
        return self.add(node.op_type, inputs, name, domain=node.domain, **attributes_of(node))

    def _slice(self, value: str, adapter: Adapter, axis: int) -> str:
        """The columns of an adapter."""
        bounds = [self.constant(np.array([each]), f"{value}.bound") for each in (adapter.first, adapter.last, axis)]
        return self.add("Slice", [value, *bounds], f"{adapter.name}.part")

    def _dropout(self, x: str, adapter: Adapter, seed: int) -> str:
        """x with some elements dropped; which ones differs from adapter to adapter and from run to run."""
        ratio = self.constant(np.array(adapter.lora.dropout, np.float32), f"{adapter.name}.lora_dropout.ratio")
        name, own = f"{adapter.name}.lora_dropout", zlib.crc32(f"{seed} {adapter.name}".encode())
        if self._drawn:
            drawn = self.add("Add", [DRAW, self.constant(np.array([own]), f"{name}.own")], f"{name}.seed")
            return self.add("DropoutTraining", [x, drawn, ratio], name, domain=MICROSOFT)
        training = self.constant(np.array(True), f"{name}.training")
        return self.add("Dropout", [x, ratio, training], name, seed=own)


def insert(
    graph: onnx.GraphProto, adapters: Iterable[Adapter], scaled: bool = False, seed: int | None = None,
    drawn: bool = False,
) -> None:  # fmt: skip
    """Let the readers of each product's result read the sum of it and of what its adapters compute.

    Where the result is an output of the graph, the sum takes its name, and the result gets another one.
    graph: changed. scaled: whether B holds the scale, and the lengths of columns are factors. seed: of dropout; None:
    without it. drawn: whether a number that is an input of the graph, `draw`, decides what is dropped, beside the seed;
    else each run drops something else.
    The factors A and B are not added, only read.
    """
    writer, made = _AdapterWriter(graph, scaled, seed, drawn), dict[str, tuple[str, list[onnx.NodeProto]]]()
    nodes = {node.output[0]: node for node in graph.node if node.output}
    for output, group in groupby(adapters, key=lambda each: each.product.output):
        if output not in nodes:
            raise ValueError(f"{WHO}: the model has no value {output!r}, to which an adapter would be added")
        total = _total(writer, list(group), nodes[output])
        made[output], writer.nodes = (total, writer.nodes), []
    _redirect(graph, made)
    _keep_outputs(graph, {output: total for output, (total, _) in made.items()}, writer)


def _total(writer: _AdapterWriter, adapters: list[Adapter], node: onnx.NodeProto) -> str:
    """The sum of a product's result and of what its adapters add to all columns, or each to some of them."""
    output, columns = adapters[0].product.output, adapters[0].product.outputs
    if adapters[0].outputs == columns:
        return writer.adapted(adapters[0], node, output, f"{output}.adapted")
    bounds = sorted({0, columns, *(each.first for each in adapters), *(each.last for each in adapters)})
    sizes = writer.constant(np.diff(bounds), f"{output}.lora.sizes")
    parts = [writer.free(f"{output}.part.{number}") for number in range(len(bounds) - 1)]
    writer.nodes.append(helper.make_node("Split", [output, sizes], parts, writer.free(f"{output}/Split"), axis=-1))
    for adapter in adapters:
        place = bounds.index(adapter.first)
        parts[place] = writer.adapted(adapter, node, parts[place], f"{adapter.name}.adapted")
    return writer.add("Concat", parts, f"{output}.adapted", axis=-1)


def _redirect(graph: onnx.GraphProto, made: Mapping[str, tuple[str, list[onnx.NodeProto]]]) -> None:
    """Put new nodes behind those whose results they read, and let other nodes read the new results."""
    names = {old: new for old, (new, _) in made.items()}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        rename_inputs(node, names)
        nodes.append(node)
        for output in filter(made.__contains__, node.output):
            for own in made[output][1]:
                rename_inputs(own, {old: new for old, new in names.items() if old != output})
                nodes.append(own)
    keep(graph.node, nodes)


def _keep_outputs(graph: onnx.GraphProto, totals: Mapping[str, str], writer: _AdapterWriter) -> None:
    """Give the sums of results that are outputs of the graph these outputs' names. totals: the sums' names."""
    names: dict[str, str] = {}
    for output in (each.name for each in graph.output if each.name in totals):
        names |= {totals[output]: output, output: writer.free(f"{output}.base")}
    for node in graph.node:
        rename(node, names)

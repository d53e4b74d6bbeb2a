"""Puts adapters into a model: nodes beside products, whose factors are initializers of the model."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from opgrad.graph.messages import attribute_of, free_name, keep
from opgrad.graph.nodes import names_in, rename, rename_inputs
from opgrad.training.tune.lora import WHO, Adapter


class _Writer:
    """Appends the nodes of adapters to a graph. scaled: whether B holds the scale already. seed: see `insert`."""

    def __init__(self, graph: onnx.GraphProto, scaled: bool, seed: int | None):
        self.graph, self._scaled, self._seed = graph, scaled, seed
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

    def split(self, value: str, sizes: str, parts: int) -> list[str]:
        """Split the last axis of a value; returns the names of the parts."""
        names = [self.free(f"{value}.part.{number}") for number in range(parts)]
        self.nodes.append(helper.make_node("Split", [value, sizes], names, self.free(f"{value}/Split"), axis=-1))
        return names

    def constant(self, value: np.ndarray, name: str) -> str:
        """Add an initializer."""
        name = self.free(name)
        self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def addend(self, adapter: Adapter, node: onnx.NodeProto) -> str:
        """What an adapter adds to the result of its product's node."""
        name, product, op = adapter.name, adapter.product, "MatMul"
        x = product.input
        if self._seed is not None and adapter.lora.dropout and not adapter.is_table:
            x = self._dropout(x, adapter, self._seed)
        if adapter.is_table:
            low = self.add("Gather", [adapter.a, x], f"{name}.lora_A")
        elif product.op == "Conv":
            op = "Conv"
            given = dict(map(attribute_of, node.attribute))
            low = self.add(op, [x, adapter.a], f"{name}.lora_A", **given)
        else:
            low = self.add(op, [x, adapter.a], f"{name}.lora_A")
        if not self._scaled and adapter.lora.scale != 1:
            scale = self.constant(np.array(adapter.lora.scale, np.float32), f"{name}.lora_scale")
            low = self.add("Mul", [low, scale], f"{name}.lora_A.scaled")
        return self.add(op, [low, adapter.b], f"{name}.lora_B")

    def _dropout(self, x: str, adapter: Adapter, seed: int) -> str:
        """x with some elements dropped; which ones differs from adapter to adapter and from run to run."""
        ratio = self.constant(np.array(adapter.lora.dropout, np.float32), f"{adapter.name}.lora_dropout.ratio")
        training = self.constant(np.array(True), f"{adapter.name}.lora_dropout.training")
        own = zlib.crc32(f"{seed} {adapter.name}".encode())
        return self.add("Dropout", [x, ratio, training], f"{adapter.name}.lora_dropout", seed=own)


def insert(graph: onnx.GraphProto, adapters: Iterable[Adapter], scaled: bool = False, seed: int | None = None) -> None:
    """Let the readers of each product's result read the sum of it and of what its adapters compute.

    Where the result is an output of the graph, the sum takes its name, and the result gets another one.
    graph: changed. scaled: whether B holds the scale. seed: of dropout; None: without it.
    The factors A and B are not added, only read.
    """
    writer, made = _Writer(graph, scaled, seed), dict[str, tuple[str, list[onnx.NodeProto]]]()
    nodes = {node.output[0]: node for node in graph.node if node.output}
    for output, group in groupby(adapters, key=lambda each: each.product.output):
        if output not in nodes:
            raise ValueError(f"{WHO}: the model has no value {output!r}, to which an adapter would be added")
        total = _total(writer, list(group), nodes[output])
        made[output], writer.nodes = (total, writer.nodes), []
    _redirect(graph, made)
    _keep_outputs(graph, {output: total for output, (total, _) in made.items()}, writer)


def _total(writer: _Writer, adapters: list[Adapter], node: onnx.NodeProto) -> str:
    """The sum of a product's result and of what its adapters add to all columns, or each to some of them."""
    output, columns = adapters[0].product.output, adapters[0].product.outputs
    if adapters[0].outputs == columns:
        return writer.add("Add", [output, writer.addend(adapters[0], node)], f"{output}.adapted")
    bounds = sorted({0, columns, *(each.first for each in adapters), *(each.last for each in adapters)})
    sizes = writer.constant(np.diff(bounds), f"{output}.lora.sizes")
    parts = writer.split(output, sizes, len(bounds) - 1)
    for adapter in adapters:
        place = bounds.index(adapter.first)
        parts[place] = writer.add("Add", [parts[place], writer.addend(adapter, node)], f"{adapter.name}.adapted")
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


def _keep_outputs(graph: onnx.GraphProto, totals: Mapping[str, str], writer: _Writer) -> None:
    """Give the sums of results that are outputs of the graph these outputs' names. totals: the sums' names."""
    names: dict[str, str] = {}
    for output in (each.name for each in graph.output if each.name in totals):
        names |= {totals[output]: output, output: writer.free(f"{output}.base")}
    for node in graph.node:
        rename(node, names)

"""Puts adapters into a model: nodes beside products, whose factors are initializers of the model."""

import zlib
from collections.abc import Iterable, Mapping
from itertools import groupby

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.messages import keep, opset_of
from opgrad.onnx.graph.nodes import attributes_of, names_in, rename, rename_inputs
from opgrad.tune.dora import bias_of
from opgrad.tune.language.model import WHO
from opgrad.tune.lora import Adapter

DRAW = "draw"  # an input, int64 [1]


class _AdapterWriter:
    """Writes the nodes of adapters. scaled, seed, drawn: see `insert`."""

    def __init__(self, model: onnx.ModelProto, scaled: bool, seed: int | None, drawn: bool):
        self.body = GraphBody(opset_of(model), names_in(model.graph))
        self._scaled, self._seed, self._drawn = scaled, seed, drawn

    def _value(self, name: str) -> Value:
        """A value of the graph, in float32 where it is scaled here."""
        return Value(self.body, name, TensorProto.FLOAT)

    def addend(self, adapter: Adapter, node: onnx.NodeProto) -> Value:
        """What an adapter adds to the result of its product's node."""
        body, x, a = self.body, self._value(adapter.product.input), self._value(adapter.a)
        op = "Conv" if adapter.product.op == "Conv" else "MatMul"
        if self._seed is not None and adapter.lora.dropout and not adapter.is_table:
            x = self._dropout(x, adapter, self._seed)
        if adapter.is_table:
            low = body.node("Gather", a, x)
        else:
            low = body.node(op, x, a, **(attributes_of(node) if op == "Conv" else {}))
        if not self._scaled and adapter.lora.scale != 1:
            low *= adapter.lora.scale
        return body.node(op, low, self._value(adapter.b))

    def adapted(self, adapter: Adapter, node: onnx.NodeProto, part: Value) -> Value:
        """What an adapter makes of the columns of a product's result to which it adds."""
        self.body.scope(f"{adapter.name}.lora")
        low = self.addend(adapter, node)
        if not adapter.lora.dora:
            return part + low
        factor = self._value(adapter.magnitude) if self._scaled else self._factor(adapter, node)
        if not (name := bias_of(node)):
            return (part + low) * factor
        bias = self._columns(self._value(name), adapter, -1)
        return (part - bias + low) * factor + bias

    def _factor(self, adapter: Adapter, node: onnx.NodeProto) -> Value:
        """The lengths of columns over the norms that they have; see `dora`."""
        assert adapter.norms is not None
        a, b = self._value(adapter.a), self._value(adapter.b)
        rows, scale = a.transpose(1, 0), adapter.lora.scale
        weight = map(self._value, node.input[1 : facts_of(node).bias])
        crossed = self.body.node(node.op_type, rows, *weight, domain=node.domain, **attributes_of(node))
        crossed = self._columns(crossed, adapter, 1)
        own = self.body.node("MatMul", self.body.node("MatMul", rows, a), b)
        total = (b * (own * scale + (crossed + crossed))).sum([0], keepdims=False)
        norm = (total * scale + self.body.constant(adapter.norms.astype(np.float32))).apply("Sqrt")
        return self._value(adapter.magnitude) / self.body.microsoft("StopGradient", norm)

    @staticmethod
    def _columns(value: Value, adapter: Adapter, axis: int) -> Value:
        """The columns of an adapter."""
        whole = adapter.outputs == adapter.product.outputs
        return value if whole else value.slice(adapter.first, adapter.last, axis)

    def _dropout(self, x: Value, adapter: Adapter, seed: int) -> Value:
        """x with some elements dropped; which ones differs from adapter to adapter and from run to run."""
        body, own = self.body, zlib.crc32(f"{seed} {adapter.name}".encode())
        ratio = body.constant(np.array(adapter.lora.dropout, np.float32))
        if self._drawn:
            drawn = Value(body, DRAW, TensorProto.INT64) + body.constant(np.array([own]))
            return body.microsoft("DropoutTraining", x, drawn, ratio)
        return body.node("Dropout", x, ratio, body.constant(np.array(True)), seed=own)

    def total(self, adapters: list[Adapter], node: onnx.NodeProto) -> Value:
        """The sum of a product's result and of what its adapters add to all columns, or each to some of them."""
        result, columns = self._value(adapters[0].product.output), adapters[0].product.outputs
        if adapters[0].outputs == columns:
            return self.adapted(adapters[0], node, result)
        bounds = sorted({0, columns, *(each.first for each in adapters), *(each.last for each in adapters)})
        self.body.scope(f"{result.name}.lora")
        sizes = self.body.ints(np.diff(bounds).tolist())
        parts = self.body.nodes_of("Split", len(bounds) - 1, result, sizes, axis=-1)
        for adapter in adapters:
            index = bounds.index(adapter.first)
            parts[index] = self.adapted(adapter, node, parts[index])
        return self.body.concat(*parts, axis=-1)


def insert(
    model: onnx.ModelProto, adapters: Iterable[Adapter], scaled: bool = False, seed: int | None = None,
    drawn: bool = False,
) -> None:  # fmt: skip
    """Let the readers of each product's result read the sum of it and of what its adapters compute.

    Where the result is an output of the graph, the sum takes its name, and the result gets another one.
    model: changed. scaled: whether B holds the scale, and the lengths of columns are factors. seed: of dropout; None:
    without it. drawn: whether a number that is an input of the graph, `draw`, decides what is dropped, beside the seed;
    else each run drops something else.
    The factors A and B are not added, only read.
    """
    graph, writer = model.graph, _AdapterWriter(model, scaled, seed, drawn)
    made, body = dict[str, tuple[str, list[onnx.NodeProto]]](), writer.body
    nodes = {node.output[0]: node for node in graph.node if node.output}
    for output, group in groupby(adapters, key=lambda each: each.product.output):
        if output not in nodes:
            raise ValueError(f"{WHO}: the model has no value {output!r}, to which an adapter would be added")
        total = writer.total(list(group), nodes[output])
        made[output], body.nodes = (total.name, body.nodes), []
    graph.initializer.extend(body.initializers)
    _redirect(graph, made)
    names: dict[str, str] = {}
    for output in (each.name for each in graph.output if each.name in made):
        names |= {made[output][0]: output, output: body.free(f"{output}.base")}
    for node in graph.node:
        rename(node, names)


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

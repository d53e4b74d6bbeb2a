"""Takes caches, masks and positions out of a language model: whole sequences are given, padded on the right."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of, keep
from opgrad.onnx.graph.nodes import needed, read_by

# The places of caches among the inputs of operators of attention; their results behind the first are caches, too.
PAST = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7), "Attention": (4,)}
SCOPE = "without_caches/"
POSITIONS = f"{SCOPE}positions"  # the value with the place of each token in its row


def without_caches(source: onnx.ModelProto, tokens: str, logits: str, what: str) -> onnx.ModelProto:
    """The graph from tokens to scores, for sequences without anything before them.

    Masks become ones, positions count from 0, and caches are empty. Padding on the right needs no mask, as attention is
    causal. what: the model's name in messages. Raises NotImplementedError for other inputs.
    """
    model = copied(source)
    graph = model.graph
    _drop_past(graph, tokens)
    keep(graph.output, [each for each in graph.output if each.name == logits])
    keep(graph.node, needed(graph.node, [logits]))
    read = read_by(graph.node)
    held = {each.name for each in graph.initializer}
    others = [each for each in graph.input if each.name in read and each.name != tokens and each.name not in held]
    writer = _CacheWriter(tokens)
    for each in others:
        writer.replace(each, what)
    keep(graph.input, [each for each in graph.input if each.name == tokens])
    graph.initializer.extend(writer.constants)
    keep(graph.node, [*writer.nodes, *graph.node])
    keep(graph.initializer, [each for each in graph.initializer if each.name in read_by(graph.node)])
    return model


def _drop_past(graph: onnx.GraphProto, tokens: str) -> None:
    """Leave out the inputs and results of attention's nodes that are caches."""
    given = {each.name for each in graph.input} - {tokens}
    for node in graph.node:
        places = PAST.get(node.op_type, ()) if domain_of(node) == MICROSOFT else ()
        if node.op_type == "Attention" and not domain_of(node):
            places = (4, 5)
        past = [place for place in places if place < len(node.input) and node.input[place] in given]
        for place in past:
            node.input[place] = ""
        if past:
            del node.output[1:]
        while node.input and not node.input[-1]:
            node.input.pop()


class _CacheWriter:
    """Nodes that compute what were inputs. tokens: the input of whose shape they are."""

    def __init__(self, tokens: str):
        self._tokens = tokens
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._made: dict[str, str] = {}

    def replace(self, value: onnx.ValueInfoProto, what: str) -> None:
        """Compute an input of the graph."""
        kind, name = value.type.tensor_type, value.name
        makers: Mapping[str, Callable[[], str]] = {"mask": self._ones, "position": self._positions}
        maker = next((make for part, make in makers.items() if part in name), None)
        if maker is not None and len(kind.shape.dim) == 2:
            self._node("Cast", [maker()], name, to=kind.elem_type)
        elif "past" in name or "cache" in name:
            self._empty(value)
        else:
            raise NotImplementedError(f"{what} has the input {name!r}, expected tokens, masks, positions and caches")

    def _node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], f"{SCOPE}{output}/{op}", **attributes))
        return output

    def _constant(self, value: np.ndarray, name: str) -> str:
        if name not in {each.name for each in self.constants}:
            self.constants.append(numpy_helper.from_array(value, name))
        return name

    def _shape(self) -> str:
        if "shape" not in self._made:
            self._made["shape"] = self._node("Shape", [self._tokens], f"{SCOPE}shape")
        return self._made["shape"]

    def _ones(self) -> str:
        """Ones, int64, of the shape of the tokens."""
        if "ones" not in self._made:
            one = helper.make_tensor("value", TensorProto.INT64, [1], [1])
            self._made["ones"] = self._node("ConstantOfShape", [self._shape()], f"{SCOPE}ones", value=one)
        return self._made["ones"]

    def _positions(self) -> str:
        """The place of each token in its row, from 0."""
        if "positions" not in self._made:
            axis = self._constant(np.array(1, np.int64), f"{SCOPE}axis")
            self._made["positions"] = self._node("CumSum", [self._ones(), axis], POSITIONS, exclusive=1)
        return self._made["positions"]

    def _empty(self, value: onnx.ValueInfoProto) -> None:
        """An empty cache: its axis with an unknown size has none, but for the first, that of the batch."""
        kind = value.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in kind.shape.dim]
        rest = self._constant(np.array(sizes[1:], np.int64), f"{SCOPE}{value.name}/sizes")
        zero = self._constant(np.array([0], np.int64), f"{SCOPE}zero")
        rows = self._node("Gather", [self._shape(), zero], f"{SCOPE}{value.name}/rows", axis=0)
        shape = self._node("Concat", [rows, rest], f"{SCOPE}{value.name}/shape", axis=0)
        nothing = helper.make_tensor("value", kind.elem_type, [1], [0])
        self._node("ConstantOfShape", [shape], value.name, value=nothing)

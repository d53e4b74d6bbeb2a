"""Finds, in an eval graph, the tensors that the loss compares and the outputs of the exported model."""

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import onnx
from onnx import numpy_helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, domain_of
from opgrad.onnx.graph.nodes import attributes_of, captured, needed, read_by

OUTPUTS = "opgrad.outputs"  # the entry of an eval model's metadata with the outputs that the model had, as JSON
LOSSES = ("SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal", "NegativeLogLikelihoodLoss")
# Operators that change the shape of their first input, and with them those that remove or add elements.
RESHAPING = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast")
MOVING = (*RESHAPING, "Slice", "Pad")
OF_A_LOSS = re.compile(r"onnx::.+::\d+")  # the names of tensors in losses that are appended to a model


@dataclass(frozen=True)
class Objective:
    """The tensors that the loss of an eval graph compares.

    scores: the tensor that it compares with a label; None if there is none.
    label: the input of the graph that holds the labels; None if no input holds labels alone.
    classes: the tensor of the labels as the loss takes it, if these are classes along axis 1 of the scores.
    ignored: a class that is ignored; None if there is none.
    every: whether the loss uses all elements of the label.
    outputs: the tensors that become the outputs of exported models.
    """

    scores: str | None
    label: str | None
    classes: str | None
    ignored: int | None
    every: bool
    outputs: tuple[str, ...]


def model_outputs(model: onnx.ModelProto) -> list[str]:
    """The outputs that the model of an eval graph had before the loss was appended; empty if they were not noted."""
    noted = next((each.value for each in model.metadata_props if each.key == OUTPUTS), "[]")
    with suppress(ValueError, RecursionError):
        names = json.loads(noted)
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return []


def note_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Note the names of a model's outputs in its metadata, for `model_outputs`."""
    model.metadata_props.add(key=OUTPUTS, value=json.dumps(list(names)))


def find_objective(model: onnx.ModelProto, loss: str, inputs: Sequence[str]) -> Objective:
    """What an eval graph compares. loss: its output. inputs: those that a batch holds, a label being the last."""
    part = _LossPart(model, loss)
    node = next((each for each in part.nodes if each.op_type in LOSSES and len(each.input) > 1), None)
    if node is None:
        return _without_classes(part, inputs)
    scores, labels = node.input[0], node.input[1]
    origin = part.origins(labels, MOVING)[-1]
    label = origin if origin in inputs and origin not in part.before(scores) else None
    return Objective(
        scores=scores,
        label=label,
        classes=labels,
        ignored=_ignored(model.graph, node),
        every=label is not None and part.origins(labels, RESHAPING)[-1] == label,
        outputs=part.exported(scores, label, inside=labels not in inputs),
    )


def _without_classes(part: "_LossPart", inputs: Sequence[str]) -> Objective:
    """The objective of a graph without a cross-entropy node."""
    label = inputs[-1] if len(inputs) > 1 else None
    scores = find_scores(part.graph, inputs, label) if label is not None else None
    if scores is None or label is None:
        return Objective(None, label, None, None, False, part.own(label) or (part.loss,))
    axes = [len(part.graph.sizes(name) or ()) for name in (scores, label)]
    classes = part.graph.element_type(label) not in (None, *FLOATS) and axes[0] == axes[1] + 1
    outputs = part.exported(scores, label, inside=False)
    return Objective(scores, label, label if classes else None, None, True, outputs)


class _LossPart:
    """The part of an eval graph that leads to the loss.

    nodes: those on which the loss depends, in their order.
    """

    def __init__(self, model: onnx.ModelProto, loss: str):
        self.graph, self.loss = Graph(model), loss
        self._producers, self.before = self.graph.producers, self.graph.before
        self.nodes = needed(model.graph.node, [loss])

    def origins(self, name: str, operators: Collection[str]) -> list[str]:
        """A tensor, and its predecessors through a chain of these operators, the nearest first."""
        found: dict[str, None] = {}
        while name not in found:  # ends in a damaged graph with a circle, too
            found[name] = None
            node = self._producers.get(name)
            if node is not None and node.input and node.op_type in operators and not domain_of(node):
                name = node.input[0]
        return list(found)

    def own(self, label: str | None) -> tuple[str, ...]:
        """The outputs that the model had, without the loss and without those that depend on the label."""
        names = [name for name in model_outputs(self.graph.model) if name in self._producers and name != self.loss]
        return tuple(name for name in names if label not in self.before(name))

    def _follow(self, scores: str, own: Collection[str], label: str | None) -> bool:
        """Whether scores can be computed from outputs that the model had, with the label and no other input."""
        read = read_by(needed(list(self.graph.nodes()), [scores], set(own)))
        return read.intersection(each.name for each in self.graph.graph.input) <= {label}

    def exported(self, scores: str, label: str | None, inside: bool) -> tuple[str, ...]:
        """The outputs of an exported model: one that holds the scores, or else those that the model had.

        inside: whether the loss is part of the original model, which then reshaped the scores for the loss.
        """
        own = self.own(label)
        known = {*own, *self.graph.outputs}
        given = self._given(scores)
        origins = [name for name in self.origins(given, MOVING) if name in self._producers]
        if found := [name for name in origins if name in known]:
            return (found[0],)
        if own and not self._follow(given, own, label):
            return (given,)  # such as what a softmax at the end takes
        return own or (origins[-1] if inside and origins and given == scores else given,)

    def _given(self, name: str) -> str:
        """The tensor that was passed to an appended loss, found from a tensor inside the loss by the names there."""
        seen = {""}
        while name not in seen and OF_A_LOSS.fullmatch(name) and name in self._producers:
            seen.add(name)
            name = next(iter(self._producers[name].input), "")
        return name


def find_scores(forward: Graph, inputs: Sequence[str], label: str) -> str | None:
    """The last float tensor that every path from the data to the loss passes before it meets the label.

    inputs: those that hold data, or the label. Returns None if there is no such tensor.
    """
    graph = forward.graph
    position: dict[str, int] = {output: index for index, node in enumerate(graph.node) for output in node.output}
    data = set(inputs) - {label}
    behind_data, behind_label = _behind(graph, data), _behind(graph, {label})
    floats = {name for name in position if forward.element_type(name) in (None, *FLOATS)}
    computed = (floats & behind_data) - behind_label
    loss_nodes = [node for node in graph.node if behind_label.intersection(node.input)]
    ahead = computed.intersection(name for node in loss_nodes for name in node.input)
    while len(ahead) > 1:
        last = max(ahead, key=lambda name: position[name])
        ahead.remove(last)
        read = graph.node[position[last]].input
        if data.intersection(read):  # nodes that do not depend on data are skipped
            return None
        ahead |= computed.intersection(read)
    return next(iter(ahead), None)


def _behind(graph: onnx.GraphProto, names: Collection[str]) -> set[str]:
    """The tensors that depend on given ones, including these."""
    found = set(names)
    for node in graph.node:
        if found.intersection(captured(node)):
            found.update(node.output)
    return found


def _ignored(graph: onnx.GraphProto, node: onnx.NodeProto) -> int | None:
    """The label that a cross-entropy node ignores, from its attribute or its fourth input."""
    if isinstance(given := attributes_of(node).get("ignore_index"), int):
        return given
    name = node.input[3] if len(node.input) > 3 else ""
    value = next((numpy_helper.to_array(each) for each in graph.initializer if name and each.name == name), None)
    return int(value.item()) if value is not None and value.size == 1 else None

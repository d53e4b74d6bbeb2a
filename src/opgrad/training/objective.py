"""What a loss compares, found in an eval graph, and what is exported of a model that learnt by it."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx
from onnx import numpy_helper

from opgrad.gradients.forward import FLOATS, Forward
from opgrad.onnxruntime.messages import attribute_of, domain_of
from opgrad.onnxruntime.opset import captured
from opgrad.training.names import OUTPUTS

LOSSES = ("SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal", "NegativeLogLikelihoodLoss")
# Operators that put the elements of their first input into another shape, and those that take or add some, too.
RESHAPING = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast")
MOVING = (*RESHAPING, "Slice", "Pad")
OF_A_LOSS = re.compile(r"onnx::.+::\d+")  # what losses that are appended to a model call their tensors


@dataclass(frozen=True)
class Objective:
    """What the loss of an eval graph compares.

    scores: the tensor that it compares with a label; None if there is no such one.
    label: the input of the graph that holds the labels; None if no input holds nothing else.
    classes: the tensor of the labels as the loss takes it, if these are classes along axis 1 of the scores.
    ignored: a class that does not count.
    every: whether the loss takes all elements of the label.
    outputs: what exported models have as outputs.
    """

    scores: str | None
    label: str | None
    classes: str | None
    ignored: int | None
    every: bool
    outputs: tuple[str, ...]


def model_outputs(model: onnx.ModelProto) -> list[str]:
    """The outputs that the model of an eval graph had before it was given a loss, if somebody noted them."""
    noted = next((each.value for each in model.metadata_props if each.key == OUTPUTS), "[]")
    return [name for name in json.loads(noted) if isinstance(name, str)]


def note_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Note them."""
    model.metadata_props.add(key=OUTPUTS, value=json.dumps(list(names)))


def find_objective(model: onnx.ModelProto, loss: str, inputs: Sequence[str]) -> Objective:
    """What an eval graph compares. loss: its output. inputs: those that a batch holds, a label being the last."""
    graph = _Graph(model, loss)
    node = next((each for each in graph.nodes if each.op_type in LOSSES), None)
    if node is None:
        return _without_classes(graph, inputs)
    scores, labels = node.input[0], node.input[1]
    origin = list(graph.origins(labels, MOVING))[-1]
    label = origin if origin in inputs and origin not in graph.before(scores) else None
    return Objective(
        scores=scores,
        label=label,
        classes=labels,
        ignored=_ignored(model.graph, node),
        every=label is not None and list(graph.origins(labels, RESHAPING))[-1] == label,
        outputs=graph.exported(scores, label, inside=labels not in inputs),
    )


def _without_classes(graph: "_Graph", inputs: Sequence[str]) -> Objective:
    """What a graph compares in which no node is a loss of classes."""
    label = inputs[-1] if len(inputs) > 1 else None
    scores = find_scores(graph.model, label) if label is not None else None
    if scores is None or label is None:
        return Objective(None, label, None, None, False, graph.own(label) or (graph.loss,))
    forward = Forward(graph.model)
    axes = [len(forward.sizes(name) or ()) for name in (scores, label)]
    classes = forward.element_type(label) not in (None, *FLOATS) and axes[0] == axes[1] + 1
    outputs = graph.exported(scores, label, inside=False)
    return Objective(scores, label, label if classes else None, None, True, outputs)


class _Graph:
    """What leads to the loss in an eval graph.

    nodes: those on which the loss depends, in their order.
    """

    def __init__(self, model: onnx.ModelProto, loss: str):
        self.model, self.loss = model, loss
        self._producers = {name: node for node in model.graph.node for name in node.output if name}
        needed = self.before(loss)
        self.nodes = [node for node in model.graph.node if not needed.isdisjoint(node.output)]

    def before(self, name: str) -> set[str]:
        """The tensors on which one depends, itself included."""
        found, rest = {name}, [name]
        while rest:
            node = self._producers.get(rest.pop())
            new = set(captured(node)) - found if node is not None else set()
            found |= new
            rest += new
        return found

    def origins(self, name: str, operators: Collection[str]) -> Iterator[str]:
        """A tensor, and those of which these operators made it one after the other."""
        yield name
        while (node := self._producers.get(name)) is not None and node.op_type in operators and not domain_of(node):
            name = node.input[0]
            yield name

    def own(self, label: str | None) -> tuple[str, ...]:
        """The outputs that the model had, without the loss and without those that depend on the label."""
        names = [name for name in model_outputs(self.model) if name in self._producers and name != self.loss]
        return tuple(name for name in names if label not in self.before(name))

    def exported(self, scores: str, label: str | None, inside: bool) -> tuple[str, ...]:
        """The outputs for the scores: one that holds them, or else those that the model had.

        inside: whether the loss is part of the model, which then gave the scores the shape that the loss takes.
        """
        own = self.own(label)
        known = {*own, *(each.name for each in self.model.graph.output)}
        given = self._given(scores)
        origins = [name for name in self.origins(given, MOVING) if name in self._producers]
        if found := [name for name in origins if name in known]:
            return (found[0],)
        return own or (origins[-1] if inside and origins and given == scores else given,)

    def _given(self, name: str) -> str:
        """The tensor that a loss was given to compute one of, by the names of those that it writes."""
        while OF_A_LOSS.fullmatch(name) and name in self._producers:
            name = self._producers[name].input[0]
        return name


def find_scores(model: onnx.ModelProto, label: str) -> str | None:
    """The last tensor of floats that every way from the data to the loss passes before it meets the label."""
    graph, forward = model.graph, Forward(model)
    position: dict[str, int] = {output: index for index, node in enumerate(graph.node) for output in node.output}
    behind_label = {label}
    for node in graph.node:
        if behind_label.intersection(node.input):
            behind_label.update(node.output)
    floats = {name for name in position if forward.element_type(name) in (None, *FLOATS)}
    computed = floats - behind_label
    loss_nodes = [node for node in graph.node if behind_label.intersection(node.input)]
    ahead = computed.intersection(name for node in loss_nodes for name in node.input)
    while len(ahead) > 1:
        last = max(ahead, key=lambda name: position[name])
        ahead.remove(last)
        ahead |= computed.intersection(graph.node[position[last]].input)
    return next(iter(ahead), None)


def _ignored(graph: onnx.GraphProto, node: onnx.NodeProto) -> int | None:
    """The label that a loss of classes ignores, which an attribute or the fourth input tells."""
    attributes = dict(map(attribute_of, node.attribute))
    if "ignore_index" in attributes:
        return int(attributes["ignore_index"])
    if len(node.input) > 3 and node.input[3]:
        value = next((each for each in graph.initializer if each.name == node.input[3]), None)
        return None if value is None else int(numpy_helper.to_array(value).item())
    return None

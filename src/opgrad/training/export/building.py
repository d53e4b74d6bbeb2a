"""Builds the graphs of an exported step: one with gradients and optimizer, one for evaluation, one for inference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.base.files import json_object
from opgrad.onnx.graph.formulas import Body, GraphBody, Value
from opgrad.onnx.graph.messages import FEW_BITS, declared_types, domain_of, keep, opset_of
from opgrad.onnx.graph.nodes import names_in, needed, read_by, rename_inputs
from opgrad.onnx.plain.lowering import FEEDBACK
from opgrad.onnx.plain.optimizer import adamw_step, clip_factor, corrections, sgd_step, sum_of_squares
from opgrad.training.export.layout import PARAMETERS, STATISTICS, Carried, Constants, StateLayout, StateTensor
from opgrad.training.export.plain import plain_model, use_blocks
from opgrad.training.export.rules import AdagradRule, LionRule, MomentumRule, StepRule
from opgrad.training.files.artifact_set import AdamWRule, ArtifactSet, SGDRule, settings_of
from opgrad.training.make.outputs import inputs_as_constants

FLOAT = TensorProto.FLOAT
Types: TypeAlias = Mapping[str, onnx.TypeProto]  # of values, by name


def bake(graph: onnx.GraphProto, frozen: Constants) -> None:
    """Turn the inputs that are frozen parameters or large constants into initializers."""
    tensors = []
    for value in graph.input:
        kind = value.type.tensor_type
        if value.name in frozen.arrays and kind.elem_type in FEW_BITS:  # the array has their bytes
            sizes, count = [axis.dim_value for axis in kind.shape.dim], frozen.arrays[value.name].nbytes
            tensors.append(frozen.part(value.name, value.name, kind.elem_type, sizes, 0, count))
        elif value.name in frozen.arrays:
            tensors.append(frozen.tensor(value.name))
    inputs_as_constants(graph, tensors)


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

    def scalar(self, name: str, element_type: int) -> Value:
        """A new input of shape [1], as a value of shape ()."""
        self._claim(name)
        self.model.graph.input.append(helper.make_tensor_value_info(name, element_type, [1]))
        shaped = Value(self.body, name, element_type, [1]).reshape([])
        return Value(self.body, shaped.name, element_type, [])

    def _claim(self, name: str) -> None:
        """Reserve a name that an input or output of the step must have. Raises ValueError if the graph has it."""
        if self.body.free(name) != name:
            raise ValueError(f"the graph has a value {name!r}, which is the name of an input of the step")

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
            if part.kind not in (PARAMETERS, STATISTICS) or not any(each.name in types for each in part.tensors):
                continue
            whole = self._take(part)
            if part.input == part.tensors[0].name:  # the graph reads the input itself
                typed = _typed(whole, types[part.input])
                for node in graph.node if typed.name != part.input else ():
                    rename_inputs(node, {part.input: typed.name})
                continue
            pieces = [whole]
            if len(part.tensors) > 1:
                sizes = self.body.ints([each.size for each in part.tensors])
                pieces = self.body.nodes_of("Split", len(part.tensors), whole, sizes, axis=0)
            for tensor, piece in zip(part.tensors, pieces, strict=True):
                if tensor.name in types:
                    shape = self.body.ints(tensor.shape)
                    inputs = [_typed(piece, types[tensor.name]).name, shape.name]
                    self.body.nodes.append(helper.make_node("Reshape", inputs, [tensor.name]))
        keep(graph.node, [*self.body.nodes, *graph.node])
        self.body.nodes = []

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
        graph = self.model.graph
        graph.node.extend(self.body.nodes)
        graph.initializer.extend(self.body.initializers)
        del graph.value_info[:]  # runtimes infer it, and after lowering to functions some of it is wrong


def _typed(value: Value, element_type: int) -> Value:
    return value if value.element_type == element_type else value.cast(element_type)


RATE, STEP, SHARE, UPDATE = "learning_rate", "step", "share", "update"
LOSS, ACCURACY = "loss", "accuracy"
TYPE_OF_ACCURACY = helper.make_tensor_type_proto(FLOAT, [])


@dataclass(frozen=True)
class Labels:
    """Labels that are classes, and the scores that the loss compares with them.

    name: of the input. compared: the value with one label for each row of scores, the input or a Reshape of it.
    element_type: TensorProto's. classes: how many there are. ignored: the label that does not count.
    """

    name: str
    compared: str
    scores: str
    element_type: int
    classes: int | None
    ignored: int


@dataclass(frozen=True)
class GradientGraph:
    """A training graph in operators of ai.onnx, without outputs.

    types: of its values. gradients: names by parameter. statistics: names of new values by running statistic.
    """

    model: onnx.ModelProto
    types: Types
    gradients: Mapping[str, str]
    statistics: Mapping[str, str]


def plain_gradients(
    artifacts: ArtifactSet, model: onnx.ModelProto, constants: Constants, opset: int | None
) -> GradientGraph:
    """The training graph of an artifact set in operators of ai.onnx.

    model: the graph, which is changed. constants: the values that will be initializers.

    Raises NotImplementedError for operators without a plain form.
    """
    use_blocks(model, constants, opset)
    plain = plain_model(model, opset)
    entries = {each.key: each.value for each in plain.metadata_props}
    what = f"metadata {FEEDBACK} of the training model"
    statistics = {source: name for name, source in json_object(entries.get(FEEDBACK, "{}"), what).items()}
    types = declared_types(plain.graph)
    del plain.metadata_props[:], plain.graph.output[:]
    return GradientGraph(plain, types, artifacts.gradients, statistics)


# --- steps of optimizers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A parameter, or all of them behind each other, with its moments and its gradient; all of one element type."""

    parameter: Value
    moments: tuple[Value, ...]
    gradient: Value


New = tuple[Value, ...]
"""The parameter after a step, and its moments."""


def stepped(rule: StepRule, slots: Sequence[Slot], rate: Value, count: Value) -> list[New]:
    """Parameters and moments after a step along gradients that are clipped, together, if the rule says so.

    rate, count: of shape (); the learning rate, and the number of this step, from 1.
    """
    if rule.max_norm is not None:
        factor = clip_factor(sum_of_squares([each.gradient for each in slots]), rule.max_norm)
        slots = [replace(each, gradient=each.gradient * factor.like(each.gradient)) for each in slots]
    if not isinstance(rule, AdamWRule):
        return [_stepped(rule, slot, rate) for slot in slots]
    scalars = (rate, *corrections(rate, count, (rule.alpha, rule.beta), bool(rule.correct_bias)))
    settings = {name: value for name, value in settings_of(rule).items() if name != "correct_bias"}
    found = list[New]()
    for each in slots:
        first, second = each.moments
        found.append(adamw_step(each.parameter, first, second, each.gradient, scalars, **settings))
    return found


def _stepped(rule: SGDRule | MomentumRule | LionRule | AdagradRule, slot: Slot, rate: Value) -> New:
    p, g = slot.parameter, slot.gradient
    if isinstance(rule, SGDRule):
        return (sgd_step(p, g, rate),)
    (m,) = slot.moments
    if isinstance(rule, LionRule):
        direction = (m * rule.alpha + g * (1 - rule.alpha)).apply("Sign")
        if rule.weight_decay:
            direction = direction + p * rule.weight_decay
        return sgd_step(p, direction, rate), m * rule.beta + g * (1 - rule.beta)
    if rule.weight_decay:
        g = g + p * rule.weight_decay
    if isinstance(rule, MomentumRule):
        m = m * rule.momentum + g
        return sgd_step(p, g + m * rule.momentum if rule.nesterov else m, rate), m
    m = m + g * g
    return sgd_step(p, g / (m.apply("Sqrt") + rule.epsilon), rate), m


def build_step(
    found: GradientGraph, layout: StateLayout, rule: StepRule, frozen: Constants, outputs: Mapping[str, str],
    labels: Labels | None,
) -> onnx.ModelProto:  # fmt: skip
    """The model of a step.

    layout: the inputs whose new values are outputs. frozen: values that become part of the model. outputs: for each
    value of the graph that becomes an output its name there, the loss first. labels: those of the accuracy, if wanted.
    """
    model = found.model
    bake(model.graph, frozen)
    packing = Packing(model, layout)
    seed_dropout(packing, found.types)
    _append_outputs(packing, outputs, found.types, labels)
    packing.body.scope("optimizer")
    rate, count = packing.scalar(RATE, FLOAT), packing.scalar(STEP, TensorProto.INT64)
    groups = [layout.trainable] if layout.flat else [[each] for each in layout.trainable]
    slots = []
    for group in groups:
        gradients = [Value(packing.body, found.gradients[each.name]).cast(FLOAT) for each in group]
        gradient = packing.joined(gradients) if layout.flat else gradients[0]
        parameter = packing.section(group)
        slots.append(Slot(parameter, tuple(packing.section(each) for each in layout.moments(group)), gradient))
    update = None
    if layout.accumulates:  # each batch adds its share to sums, which begin at 0 after a step
        share, update = packing.scalar(SHARE, FLOAT), packing.scalar(UPDATE, TensorProto.BOOL)
        for index, group in enumerate(groups):
            sums = layout.sums(group)
            total = packing.section(sums) + slots[index].gradient * share
            packing.put(sums, packing.body.where(update, 0, total))
            slots[index] = replace(slots[index], gradient=total)
    for group, slot, new in zip(groups, slots, stepped(rule, slots, rate, count), strict=True):
        sections, old = [group, *layout.moments(group)], (slot.parameter, *slot.moments)
        for tensors, value, before in zip(sections, new, old, strict=True):
            packing.put(tensors, value if update is None else packing.body.where(update, value, before))
    for tensor in layout.statistics:
        packing.put([tensor], Value(packing.body, found.statistics[tensor.name], FLOAT))
    packing.put_out()
    packing.finish()
    return model


def build_forward(
    artifacts: ArtifactSet, layout: StateLayout, frozen: Constants, outputs: Mapping[str, str], labels: Labels | None,
    opset: int | None,
) -> onnx.ModelProto:  # fmt: skip
    """The eval graph up to some of its values, with the parameters as the step takes them; see `build_step`."""
    model = plain_model(artifacts.eval_model, opset)
    keep(model.graph.node, needed(model.graph.node, outputs))
    read = read_by(model.graph.node)
    keep(model.graph.input, [each for each in model.graph.input if each.name in read])
    keep(model.graph.initializer, [each for each in model.graph.initializer if each.name in read])
    types = declared_types(model.graph)
    del model.graph.output[:]
    bake(model.graph, frozen)
    packing = Packing(model, layout)
    _append_outputs(packing, outputs, types, labels)
    packing.finish()
    return model


# --- outputs ---------------------------------------------------------------------------------------------------------


def _append_outputs(packing: Packing, outputs: Mapping[str, str], types: Types, labels: Labels | None) -> None:
    """Turn values into outputs, and append the accuracy if there are labels."""
    packing.body.scope("outputs")
    for value, name in outputs.items():
        packing.output(name, Value(packing.body, value), types.get(value))
    if labels is not None:
        body = packing.body
        given = Value(body, labels.compared, labels.element_type)
        best = Value(body, labels.scores).apply("ArgMax", axis=1, keepdims=0).like(given)
        counts = ~given.is_label(labels.ignored)
        right, counted = (each.cast(FLOAT).sum(keepdims=False) for each in (best.equals(given) & counts, counts))
        share = right / body.node("Max", counted, body.number(1.0, counted))  # 0 if none counts
        packing.output(ACCURACY, share, TYPE_OF_ACCURACY)


# --- dropout by a seed that the client gives ---


SEED = "seed"
RATIO = 0.5  # the ratio of a node that has none
PRIME = 2**31 - 1
STRIDE = 1_000_003  # the distance between the first numbers of two nodes
ROUNDS = ((16807, 12345), (48271, 1013904), (69621, 374761))  # each round computes h = h² + a·h + b


def seed_dropout(packing: Packing, types: Types) -> None:
    """Replace every dropout that may drop something by nodes that hash the seed; add the seed as input if needed."""
    graph = packing.model.graph
    idle = {each.name for each in graph.initializer if not each.dims and not numpy_helper.to_array(each)}
    plain = (node for node in graph.node if node.op_type == "Dropout" and not domain_of(node))
    trained = (node for node in plain if len(node.input) > 2 and node.input[2])  # in training mode, by the third input
    dropping = [node for node in trained if not idle.intersection(node.input[1:])]
    if not dropping:
        return
    body = packing.body
    body.scope("dropout")
    start = _modulo(packing.scalar(SEED, TensorProto.INT64)) * ROUNDS[0][0]
    numbers = {node.output[0]: number for number, node in enumerate(dropping)}
    nodes = []
    for node in graph.node:
        if node.output and node.output[0] in numbers:
            _write(body, node, start + numbers[node.output[0]] * STRIDE, types)
            node_list, body.nodes = body.nodes, []
            nodes.extend(node_list)
        else:
            nodes.append(node)
    keep(graph.node, nodes)


def _write(body: Body, node: onnx.NodeProto, start: Value, types: Types) -> None:
    declared = types.get(node.input[0])
    x = Value(body, node.input[0], declared.tensor_type.elem_type if declared is not None else None)
    ratio = Value(body, node.input[1]).cast(FLOAT).scalar() if node.input[1] else body.number(RATIO, start.cast(FLOAT))
    training = Value(body, node.input[2]).scalar()
    # A number from 0 to 1 for each element of x.
    number = _modulo(body.range(x.size()) + start)
    for factor, term in ROUNDS:
        number = _modulo(number * number + number * factor + term)
    kept = ~(number.cast(FLOAT) * (1 / PRIME) < ratio)
    mask = kept.reshape(x.shape()) | ~training
    dropped = body.where(mask, x / (1 - ratio).like(x), 0)
    results = body.where(training, dropped, x), mask
    for value, name in zip(results, node.output, strict=False):
        if name:
            body.nodes.append(helper.make_node("Identity", [value.name], [name]))


def _modulo(value: Value) -> Value:
    return value.body.node("Mod", value, value.body.number(PRIME, value))

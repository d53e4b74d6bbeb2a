"""The four files that onnxruntime-training makes of a model, read together and checked against each other.

In them gradients are added to buffers; elsewhere they are outputs. The optimizer model says by which rule a step
changes the parameters. In the eval graph are found the tensors that the loss compares, and the model's outputs.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.helper import get_attribute_value, tensor_dtype_to_np_dtype

from opgrad.base.arguments import naming
from opgrad.base.files import finish_interrupted
from opgrad.base.locks import once
from opgrad.onnx.graph.conversion import compute_in_float32, evaluating, in_float32, is_half, written_inputs
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.loading import read_model
from opgrad.onnx.graph.messages import FLOATS, MICROSOFT, copied, domain_of, keep
from opgrad.onnx.graph.nodes import attributes_of, captured, needed, read_by
from opgrad.training.files.checkpoint import read_checkpoint
from opgrad.training.files.dataset import TensorSpec, located
from opgrad.training.files.tensor_values import Held, read_apart, shared

CLIP = "InplaceClipGradNorm"


@dataclass(frozen=True)
class SGDRule:
    """Gradient descent: `p -= learning_rate * g` (SGDOptimizerV2).

    max_norm: the largest norm that all gradients together may have, larger ones are scaled down to it; None: any.
    """

    max_norm: float | None = None


@dataclass(frozen=True)
class AdamWRule:
    """The attributes of AdamWOptimizer, with the operator's defaults.

    alpha, beta: the decay rates of the first and second moment.
    epsilon: what keeps the denominator from 0.
    weight_decay: the decay of the parameters, times the learning rate.
    adam_mode: 0 is PyTorch's order of operations, 1 that of Hugging Face; see `AdamW`.
    correct_bias: whether the moments' start at 0 is made up for.
    max_norm: the largest norm that all gradients together may have, larger ones are scaled down to it; None: any.
    """

    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    adam_mode: int = 0
    correct_bias: int = 1
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.adam_mode not in (0, 1):
            raise ValueError(f"AdamWOptimizer: adam_mode is {self.adam_mode}, expected 0 or 1")
        if self.adam_mode == 0 and not self.correct_bias:
            raise ValueError("AdamWOptimizer: correct_bias is 0, expected 1 with adam_mode 0")


Rule = SGDRule | AdamWRule
ADAMW = tuple(field.name for field in fields(AdamWRule) if field.name != "max_norm")


def settings_of(rule: AdamWRule) -> dict[str, Any]:
    """The attributes of a rule without max_norm."""
    return {name: getattr(rule, name) for name in ADAMW}


def read_rule(model: onnx.ModelProto) -> Rule:
    """The rule that an optimizer model applies.

    model: one node, AdamWOptimizer or SGDOptimizerV2, as in optimizer_model.onnx, and before it InplaceClipGradNorm
        if the gradients shall be clipped.
    Raises NotImplementedError if it has another node, ValueError if an attribute has no meaning.
    """
    nodes = list(model.graph.node)
    found = ", ".join(node.op_type for node in nodes) or "none"
    clip: dict[str, Any] = {}
    if nodes and nodes[0].op_type == CLIP:
        clip = {"max_norm": 1.0, **_attributes(nodes.pop(0), ("max_norm",))}
    kinds = [node.op_type for node in nodes]
    if kinds == ["SGDOptimizerV2"]:
        return SGDRule(**clip)
    if kinds == ["AdamWOptimizer"]:
        return AdamWRule(**_attributes(nodes[0], ADAMW), **clip)
    raise NotImplementedError(
        f"optimizer model: it has the nodes {found}, expected one AdamWOptimizer or SGDOptimizerV2, "
        f"or one {CLIP} and one of these"
    )


def _attributes(node: onnx.NodeProto, known: Collection[str]) -> dict[str, Any]:
    """The attributes of a node, which must be numbers of these names."""
    found = {item.name: get_attribute_value(item) for item in node.attribute}
    for name, value in found.items():
        if name not in known or not isinstance(value, int | float):
            what = f"{value!r}" if name in known else f"in the node {node.op_type}"
            expected = "a number" if name in known else f"none but {', '.join(known)}"
            raise ValueError(f"optimizer model: the attribute {name!r} is {what}, expected {expected}")
    return found


ACCUMULATOR = "InPlaceAccumulatorV2"
BUFFER_SUFFIX = "_grad.accumulation.buffer"  # behind a parameter's name: the input that its gradient is added to
RESULT_SUFFIX = "_grad.accumulation.out"  # behind a parameter's name: the accumulator's output, always true
RESET = "lazy_reset_grad"  # the input that says whether gradients overwrite their buffers
DIRECT_SUFFIX = "_grad.direct"  # behind a parameter's name: a copy of its gradient


def accumulating(model: onnx.ModelProto, gradients: Mapping[str, str]) -> onnx.ModelProto:
    """A copy of a training model that adds its gradients to buffers, which are inputs, as files have it.

    gradients: by parameter the name of its gradient, an output behind those of the forward part.
    """
    copy = copied(model)
    graph, first = copy.graph, len(model.graph.output) - len(gradients)
    declared = {each.name: copied(each) for each in graph.output}
    keep(graph.output, [each for each in graph.output if each.name not in gradients.values()])
    for index, (name, gradient) in enumerate(gradients.items(), first):
        buffer, result = name + BUFFER_SUFFIX, name + RESULT_SUFFIX
        graph.input.add(name=buffer, type=declared[gradient].type)
        graph.value_info.append(declared[gradient])
        graph.output.append(helper.make_tensor_value_info(result, TensorProto.BOOL, [1]))
        inputs, node = [buffer, gradient, RESET], f"GradientAccumulator{index}"
        graph.node.append(helper.make_node(ACCUMULATOR, inputs, [result], node, domain=MICROSOFT))
    graph.input.append(helper.make_tensor_value_info(RESET, TensorProto.BOOL, [1]))
    return copy


def without_accumulators(model: onnx.ModelProto, what: str) -> dict[str, str]:
    """Let a training model of a file have its gradients as outputs, in place; returns their names by parameter.

    what: the file, for messages. Raises ValueError for accumulators unlike those of artifact generators.
    """
    graph = model.graph
    used = Counter([*(name for node in graph.node for name in node.input), *(each.name for each in graph.output)])
    accumulators = [node for node in graph.node if node.op_type == ACCUMULATOR]
    for node in accumulators:
        results = [used[name] for name in node.output]
        plain = len(node.input) == 3 and node.input[0].endswith(BUFFER_SUFFIX) and node.input[2] == RESET
        if not plain or not results or results[0] > 1 or any(results[1:]) or used[node.input[0]] > 1:
            raise ValueError(
                f"{what} does not accumulate gradients as graphs of the artifact generator do: make the set anew with "
                "`opgrad artifacts`"
            )
    flags = {node.output[0] for node in accumulators}
    gone = {*(node.input[0] for node in accumulators), RESET}
    gradients = {node.input[0].removesuffix(BUFFER_SUFFIX): node.input[1] for node in accumulators}
    keep(graph.node, [node for node in graph.node if node.op_type != ACCUMULATOR])
    keep(graph.input, [each for each in graph.input if each.name not in gone])
    keep(graph.output, [each for each in graph.output if each.name not in flags])
    return with_gradients(graph, gradients, {each.name: copied(each) for each in graph.value_info})


def with_gradients(
    graph: onnx.GraphProto, gradients: Mapping[str, str], declared: Mapping[str, onnx.ValueInfoProto]
) -> dict[str, str]:
    """Append gradients to the outputs of a graph; returns their names by parameter.

    A gradient that is an output already, or that no node computes, is copied. declared: types of values.
    """
    taken, names = {each.name for each in graph.output}, {}
    produced = {name for node in graph.node for name in node.output}
    for parameter, gradient in gradients.items():
        name = gradient
        if gradient in taken or gradient not in produced:
            name = parameter + DIRECT_SUFFIX
            graph.node.append(helper.make_node("Identity", [gradient], [name]))
        taken.add(name)
        names[parameter] = name
        graph.output.append(declared.get(name) or onnx.ValueInfoProto(name=name))
    keep(graph.value_info, [each for each in graph.value_info if each.name not in taken])
    return names


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
    """What an eval graph compares. loss: its output. inputs: those that a batch holds, a label being the last.

    It is looked for in the graph, as sets of onnxruntime-training and models that have their own loss do not name it.
    """
    part = _LossPart(model, loss)
    node = next((each for each in part.nodes if each.op_type in LOSSES and len(each.input) > 1), None)
    if node is None:
        label = inputs[-1] if len(inputs) > 1 else None
        scores = find_scores(part.graph, inputs, label) if label is not None else None
        if scores is None or label is None:
            return Objective(None, label, None, None, False, part.own(label) or (part.loss,))
        axes = [len(part.graph.sizes(name) or ()) for name in (scores, label)]
        classes = part.graph.element_type(label) not in (None, *FLOATS) and axes[0] == axes[1] + 1
        outputs = part.exported(scores, label, inside=False)
        return Objective(scores, label, label if classes else None, None, True, outputs)
    scores, labels = node.input[0], node.input[1]
    origin = part.origins(labels, MOVING)[-1]
    label = origin if origin in inputs and origin not in part.before(scores) else None
    given = attributes_of(node).get("ignore_index")
    ignored = given if isinstance(given, int) else None
    if ignored is None and len(node.input) > 3:
        value = part.graph.constant(node.input[3])
        ignored = int(value.item()) if value is not None and value.size == 1 else None
    return Objective(
        scores=scores,
        label=label,
        classes=labels,
        ignored=ignored,
        every=label is not None and part.origins(labels, RESHAPING)[-1] == label,
        outputs=part.exported(scores, label, inside=labels not in inputs),
    )


class _LossPart:
    """The part of an eval graph that leads to the loss. nodes: those on which the loss depends, in their order."""

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

    def exported(self, scores: str, label: str | None, inside: bool) -> tuple[str, ...]:
        """The outputs of an exported model: one that holds the scores, or else those that the model had.

        inside: whether the loss is part of the original model, which then reshaped the scores for the loss.
        """
        own = self.own(label)
        known = {*own, *self.graph.outputs}
        given, seen = scores, {""}  # the tensor that was passed to an appended loss, by the names inside of it
        while given not in seen and OF_A_LOSS.fullmatch(given) and given in self._producers:
            seen.add(given)
            given = next(iter(self._producers[given].input), "")
        origins = [name for name in self.origins(given, MOVING) if name in self._producers]
        if found := [name for name in origins if name in known]:
            return (found[0],)
        if own:
            read = read_by(needed(list(self.graph.nodes()), [given], set(own)))
            follows = read.intersection(each.name for each in self.graph.graph.input) <= {label}
            return own if follows else (given,)  # such as what a softmax at the end takes
        return (origins[-1] if inside and origins and given == scores else given,)


def find_scores(forward: Graph, inputs: Sequence[str], label: str) -> str | None:
    """The last float tensor that every path from the data to the loss passes before it meets the label.

    inputs: those that hold data, or the label. Returns None if there is no such tensor.
    """
    graph = forward.graph
    position = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
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
            found.update(filter(None, node.output))
    return found


FILES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")


@dataclass(frozen=True)
class ArtifactSet:
    """An artifact set of onnxruntime-training.

    directory: where it was read from.
    training_model: the graph that computes loss and gradients, its outputs.
    gradients: by trainable parameter, the output with its gradient.
    eval_model: the graph that computes the loss alone, in the types of the model that the set was made of.
    rule: how the optimizer changes the parameters.
    trainable, frozen: the initial parameters, read-only, by name; only the trainable ones have gradients. Those that
        training changes are float32 where the models have float16 or bfloat16.
    constants: large tensors beside the parameters, read-only, by name; the graphs share them as inputs.
    files: for those of them that lie in a file, the file, the first byte and the number of bytes.
    tune: of a fine-tuning what identifies it, as JSON.
    inputs: the arrays of a batch, in the graph's order.
    loss: the graphs' first output.
    batch_rows: the only number of rows that the graphs take; None if any will do.
    in_halves: whether the graphs compute in float16 and bfloat16 where they have these types; else in float32.
    """

    directory: Path
    training_model: onnx.ModelProto
    gradients: Mapping[str, str]
    eval_model: onnx.ModelProto
    rule: Rule
    trainable: Mapping[str, np.ndarray]
    frozen: Mapping[str, np.ndarray]
    inputs: tuple[TensorSpec, ...]
    loss: str
    batch_rows: int | None = None
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    files: Mapping[str, tuple[Path, int, int]] = field(default_factory=dict)
    tune: str = ""
    in_halves: bool = False

    @classmethod
    @naming("ArtifactSet")
    def load(cls, directory: str | PathLike[str]) -> "ArtifactSet":
        """Read an artifact set.

        directory: the folder with training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.
        Raises FileNotFoundError if one is missing and NotADirectoryError for a file, which say what makes a set,
        ValueError for a damaged file or one of another model, NotImplementedError for an optimizer unknown to opgrad.
        """
        folder = Path(directory)
        check_folder(folder)
        training_model, eval_model, optimizer_model, checkpoint_file = (folder / name for name in FILES)
        checkpoint, what = read_checkpoint(checkpoint_file), str(training_model)
        training, values = read_apart(training_model)
        if not training.graph.output:
            raise ValueError(f"{what} has no outputs, expected the loss")
        try:
            specs = {value.name: tensor_spec(value) for value in training.graph.input}
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
        check_parameters(specs, checkpoint.trainable, checkpoint.frozen)
        gradients = without_accumulators(training, what)
        evaluation, others = read_apart(eval_model)
        rule = read_rule(read_model(optimizer_model))
        models, parameters = (training, evaluation), (checkpoint.trainable, checkpoint.frozen)
        return cls.of(folder, models, gradients, {**others, **values}, rule, parameters)

    @classmethod
    @naming("ArtifactSet")
    def of(
        cls, directory: Path, models: tuple[onnx.ModelProto, onnx.ModelProto], gradients: Mapping[str, str],
        values: Mapping[str, Held], rule: Rule, parameters: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
        inputs: Sequence[TensorSpec] = (),
    ) -> "ArtifactSet":  # fmt: skip
        """An artifact set of its graphs.

        models: the training graph, whose last outputs are the gradients, and the eval graph, both with placeholders.
        values: those of the placeholders. parameters: the trainable and the frozen ones.
        inputs: a batch's of a language model, whose graphs share large tensors in their own types; else the graph's.
        """
        given, (trainable, frozen), written = tuple(inputs), parameters, written_inputs(models[0].graph)
        specs = [tensor_spec(each) for each in models[0].graph.input if each.name not in {*trainable, *frozen}]
        own, batch_rows = (given, None) if given else located(specs)
        (training, constants), (evaluation, others) = (shared(each, values, every=bool(given)) for each in models)
        evaluating(evaluation)
        return cls(
            directory=directory,
            training_model=training,
            gradients=gradients,
            eval_model=evaluation,
            rule=rule,
            trainable={name: in_float32(array) for name, array in trainable.items()},
            frozen={name: in_float32(array) if name in written else array for name, array in frozen.items()},
            inputs=own,
            loss=training.graph.output[0].name,
            batch_rows=batch_rows,
            constants={**constants, **others},
            in_halves=bool(given),
        )

    @property
    def title(self) -> str:
        """The training graph's name in messages."""
        file = self.directory / FILES[0]
        return str(file if file.is_file() else self.directory)

    def training(self, in_halves: bool = False) -> tuple[onnx.ModelProto, Mapping[str, np.ndarray]]:
        """A copy of the training graph, and the values of its inputs that are constants, by name.

        in_halves: whether a graph that computes in float16 or bfloat16 stays so; else it computes in float32.
        """
        model = copied(self.training_model)
        if not (in_halves or self.in_halves):
            compute_in_float32(model, {*self.trainable, *written_inputs(model.graph)})
        held = {each.name for each in model.graph.input}
        return model, {name: array for name, array in self.constants.items() if name in held}

    @once
    def evaluation(self) -> onnx.ModelProto:
        """The eval graph as it is run: it computes in float32, from parameters as they are here."""
        if self.in_halves:
            return self.eval_model
        model = copied(self.eval_model)
        floats = {name for name, array in {**self.trainable, **self.frozen}.items() if array.dtype == np.float32}
        compute_in_float32(model, floats)
        return model

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The initial values of all inputs of the graphs that are not those of a batch, by name."""
        return {**self.trainable, **self.frozen, **self.constants}

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.directory.resolve().name

    @property
    def axes(self) -> dict[str, int | None]:
        """By input, the axis of the examples; None for an input that is the same for all examples."""
        return {spec.name: spec.axis for spec in self.inputs}

    @once
    def objective(self) -> Objective:
        """The tensors that the loss compares, and those that an exported model returns."""
        names = [spec.name for spec in self.inputs if spec.axis is not None]
        return find_objective(self.eval_model, self.loss, names)

    @property
    def label(self) -> TensorSpec:
        """The batch's input that the loss compares the scores with; the last input if that cannot be found out."""
        own = [spec for spec in self.inputs if spec.axis is not None]
        return next((spec for spec in own if spec.name == self.objective.label), own[-1])

    @property
    def scores(self) -> str | None:
        """The tensor that the loss compares with the label; None if there is none."""
        return self.objective.scores


@naming("ArtifactSet")
def check_folder(folder: Path) -> None:
    """Raise unless there is a folder with the files of a set, after replacing those of which that was interrupted."""
    finish_interrupted(folder)
    if folder.is_file():
        if not _missing(folder.parent):
            raise NotADirectoryError(f"{folder} is a file, expected the folder of its set, {folder.parent}")
        raise NotADirectoryError(
            f"{folder} is a file, expected the folder of an artifact set; of a model "
            f"`{_maker(folder)} -o FOLDER` makes one"
        )
    if missing := _missing(folder):
        models = sorted(folder.glob("*.onnx"))
        model = models[0] if len(models) == 1 else Path("MODEL.onnx")
        raise FileNotFoundError(
            f"{folder} has no {', '.join(missing)}; of a model `{_maker(model)} -o {quote(str(folder))}` "
            "makes these files"
        )


def _missing(folder: Path) -> list[str]:
    return [name for name in FILES if not (folder / name).is_file()]


def _maker(model: Path) -> str:
    return f"opgrad artifacts {quote(str(model))} --loss LOSS"


def tensor_spec(value: onnx.ValueInfoProto, texts: bool = False) -> TensorSpec:
    """The name, dtype and shape that a graph declares for a tensor. texts: whether it may be one of texts."""
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "any" for dim in tensor.shape.dim)
    try:
        dtype = np.dtype(tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        number = tensor.elem_type
        raise ValueError(f"the graph's {value.name!r} has the element type {number}, expected a known one") from None
    if dtype.kind == "O" and not texts:
        raise ValueError(f"the graph's {value.name!r} is text, expected numbers")
    return TensorSpec(value.name, dtype, shape)


def check_parameters(
    specs: Mapping[str, TensorSpec], trainable: Mapping[str, np.ndarray], frozen: Mapping[str, np.ndarray]
) -> None:
    """Raise ValueError unless checkpoint and training graph have the same parameters, with equal dtypes and shapes.

    Values of float32 fit a parameter in float16 or bfloat16: training keeps them so.
    specs: the training graph's inputs by name.
    """
    if RESET not in specs:
        raise ValueError(f"the graph has no input {RESET}, expected a training graph")
    have = {name.removesuffix(BUFFER_SUFFIX) for name in specs if name.endswith(BUFFER_SUFFIX)}
    given = [name for name in have - trainable.keys() - frozen.keys() if name in specs]
    if given and trainable.keys() <= have:
        raise ValueError(
            f"the training graph has gradients of its inputs {_list(given)}, which are no parameters of the "
            "checkpoint: parameters are initializers of the model that the set is made of; give them values there"
        )
    if have != trainable.keys():
        raise ValueError(
            f"the checkpoint has the trainable parameters {_list(trainable)}, "
            f"expected those of the training graph, {_list(have)}"
        )
    for name, array in (*trainable.items(), *frozen.items()):
        if name not in specs:
            raise ValueError(f"the checkpoint has {name!r}, expected inputs of the training graph")
        spec = specs[name]
        alike = array.dtype == spec.dtype or (array.dtype == np.float32 and is_half(spec.dtype))
        if array.shape != spec.shape or not alike:
            raise ValueError(
                f"the checkpoint's {name!r} is {array.dtype} of shape {array.shape}, "
                f"expected {spec.dtype} of shape {spec.shape}, as in the training graph"
            )


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"

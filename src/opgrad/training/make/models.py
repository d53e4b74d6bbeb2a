"""Builds the training model, the eval model and the parameters from a model with a loss."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError, require
from opgrad.onnx import passes
from opgrad.onnx.gradients.backward import SUFFIX
from opgrad.onnx.gradients.differentiation import Differentiated, Segments, append, differentiate, names_in, prepared
from opgrad.onnx.gradients.expansion import inline_functions
from opgrad.onnx.graph.conversion import compute_in_float32, in_float32
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph, constant_tensor, overridable
from opgrad.onnx.graph.messages import FLOATS, HALVES, copied, domain_of, keep
from opgrad.onnx.rules.quantization import BYTES_SUFFIX
from opgrad.training.files.artifact_set import (
    BUFFER_SUFFIX,
    RESET,
    RESULT_SUFFIX,
    ArtifactSet,
    Rule,
    accumulating,
    with_gradients,
)
from opgrad.training.files.dataset import TensorSpec
from opgrad.training.files.tensor_values import Held, array_of, attached, detach, is_placeholder, placeholder, tensor_of
from opgrad.training.make import forms
from opgrad.training.make.blocks import ModelAccessor
from opgrad.training.make.checks import listed, near
from opgrad.training.make.forms import OF_LOG_PROBABILITIES, guard_means, with_running_statistics
from opgrad.training.make.outputs import declare_types, inputs_as_constants, set_outputs

FLOAT32, MODEL = PRECISIONS = "float32", "model"  # in which types a training model computes


@dataclass(frozen=True)
class TrainingModels:
    """The results of `training_models`.

    training, evaluation: the models; their large constants are placeholders, whose values are in `values`.
    trainable, frozen: the parameters, in the order in which the models have them as inputs.
    values: the values of the model's large tensors, by name.
    made: the graph of the training model.
    """

    training: onnx.ModelProto
    evaluation: onnx.ModelProto
    trainable: list[TensorProto]
    frozen: list[TensorProto]
    values: dict[str, Held]
    made: Differentiated

    def for_files(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Both models as files have them: the training model adds gradients to buffers."""
        return accumulating(self.training, self.made.gradients), self.evaluation

    def whole(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Both models as files have them, with all of their values."""
        training, evaluation = self.for_files()
        return attached(training, self.values), attached(evaluation, self.values)

    def of(self, model: onnx.ModelProto) -> "TrainingModels":
        """The same with another training model, which `made` made."""
        _add_bytes(model, self.values)
        return replace(self, training=model)

    @property
    def parameters(self) -> tuple[list[TensorProto], list[TensorProto]]:
        """The trainable and the frozen parameters with their values."""
        frozen = [tensor_of(*each) for each in self._with_values(self.frozen)]
        return [tensor_of(*each) for each in self._with_values(self.trainable)], frozen

    @property
    def arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The values of the trainable and of the frozen parameters, by name."""
        groups = self.trainable, self.frozen
        trainable, frozen = ({name: array_of(held) for name, held in self._with_values(own)} for own in groups)
        return trainable, frozen

    def artifact_set(self, directory: Path, rule: Rule, inputs: Sequence[TensorSpec] = ()) -> ArtifactSet:
        """An artifact set in memory. directory: for messages, and its name is that of the set. inputs: see `of`."""
        training = copied(self.training)
        graph, names = training.graph, set(self.made.gradients.values())
        declared = {each.name: copied(each) for each in graph.output}
        keep(graph.output, [each for each in graph.output if each.name not in names])
        gradients = with_gradients(graph, self.made.gradients, declared)
        models = training, self.evaluation
        return ArtifactSet.of(directory, models, gradients, self.values, rule, self.arrays, inputs)

    def _with_values(self, parameters: Iterable[TensorProto]) -> Iterator[tuple[str, Held]]:
        return ((each.name, self.values.get(each.name, each)) for each in parameters)


def training_models(
    accessor: ModelAccessor, outputs: Sequence[str], trainable: Collection[str], frozen: Collection[str],
    checkpoint_segments: Segments = None, precision: str = FLOAT32, ends: Sequence[str] = (),
) -> TrainingModels:  # fmt: skip
    """Build training and eval model.

    accessor: the model with the loss, the first of `outputs`; changed. trainable: names of initializers, Constant nodes
    or inputs. frozen: names of initializers or Constant nodes. checkpoint_segments: as for `Differentiated.model`.
    precision: in which type the training model computes what the model computes in float16 or bfloat16: FLOAT32, and
    the parameters that training changes are float32, or MODEL. ends: further values with whose nodes segments may end.

    Raises what `training_graph` raises, LookupError for outputs and ValueError for names that the model does not have.
    """
    require(precision in PRECISIONS, "precision", precision, "'float32' or 'model'")
    if not trainable:
        raise ValueError("nothing is trainable, expected at least one parameter or input that requires a gradient")
    model, graph = accessor.model, accessor.model.graph
    for node in [node for node in graph.node if node.op_type == "Constant" and not domain_of(node)]:
        name = node.output[0]
        if (name in trainable or name in frozen) and (value := constant_tensor(node)) is not None:
            tensor = graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = name
            graph.node.remove(node)
    own = {each.name: each.data_type for each in graph.initializer}
    given = {each.name: each.type.tensor_type.elem_type for each in graph.input}
    for what, names, kinds in (("requires_grad", trainable, own | given), ("frozen_params", frozen, own)):
        for name in names:
            if name not in kinds:
                raise ArgumentError(what, f"has {name!r}, which is no initializer of the model{near(name, kinds)}")
            if what == "requires_grad" and kinds[name] not in FLOATS:
                type_name = TensorProto.DataType.Name(kinds[name])
                raise ArgumentError(what, f"has {name!r} with elements of type {type_name}, expected a float type")
    values = {**accessor.apart, **detach(model)}
    set_outputs(accessor.graph(), outputs)
    known = declare_types(model, accessor.graph())
    held = take_parameters(model, {*trainable, *frozen})
    evaluation = forms.evaluated(model, known)
    order = [each.name for each in model.graph.input if each.name in trainable]
    types: Graph | None = known
    if precision == FLOAT32:
        changed = {each.name for each in held} & {*trainable, *forms.statistics(model, training=True)}
        types = None if compute_in_float32(model, changed) else known
        held = [widened(each, values) if each.name in changed else each for each in held]
    constants = [tensor_of(each.name, values.get(each.name, each)) for each in held if each.data_type not in FLOATS]
    made = training_graph(model, outputs[0], order, constants, [*ends, *names_in(checkpoint_segments)], types)
    training = made.model(checkpoint_segments)
    _add_bytes(training, values)
    trained, kept = ([each for each in held if each.name in names] for names in (trainable, frozen))
    return TrainingModels(training, evaluation, trained, kept, values, made)


def _add_bytes(model: onnx.ModelProto, values: dict[str, Held]) -> None:
    """Add the values of placeholders that are the bytes of others; see `opgrad.onnx.rules.frozen_weights`."""
    names = [each.name for each in model.graph.initializer if is_placeholder(each) and each.name not in values]
    for name in names:
        own = name.removesuffix(BYTES_SUFFIX)
        values[name] = values[own] = array_of(values[own])


def widened(parameter: TensorProto, values: dict[str, Held]) -> TensorProto:
    """A parameter in float32 if it is a half; values: changed where they hold its values."""
    if parameter.data_type not in HALVES:
        return parameter
    array = in_float32(array_of(values.get(parameter.name, parameter)))
    if parameter.name not in values:
        return tensor_of(parameter.name, array)
    values[parameter.name] = array
    return placeholder(parameter.name, array)


def take_parameters(model: onnx.ModelProto, names: Collection[str]) -> list[TensorProto]:
    """Turn initializers into inputs behind those of the graph, in their order; returns the initializers."""
    graph = model.graph
    held = [each for each in graph.initializer if each.name in names]
    keep(graph.initializer, [each for each in graph.initializer if each.name not in names])
    graph.input.extend(helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in held)
    return held


# --- the training graph ---


def training_graph(
    model: onnx.ModelProto, loss: str, wanted: Sequence[str], constants: Sequence[TensorProto] = (),
    ends: Sequence[str] = (), known: Graph | None = None,
) -> Differentiated:  # fmt: skip
    """The model with the gradients of a loss, `<name>_grad` for each of `wanted`, behind its outputs.

    model: changed. loss: one number. wanted: inputs of the graph. constants: the values of other inputs, on which
        shapes depend. ends: values with whose nodes segments may end. known: a graph with the types of values.

    Raises ValueError for a loss that is no number or depends on none, NotImplementedError for nodes without gradient.
    """
    with_running_statistics(model)
    inputs = [copied(each) for each in model.graph.input]
    given = {each.name for each in inputs}
    inputs_as_constants(model.graph, constants)  # until the gradients are made
    model, variable = inline_functions(model), overridable(model)
    simple = Graph(model, variable, [loss, *ends], known=known)
    passes.simplify(simple)
    simple = simple.again()
    guard_means(simple, [OF_LOG_PROBABILITIES])  # others become nodes of opgrad, whose means are 0
    forward = prepared(simple, [loss], wanted)
    outputs = tuple(each.name for each in forward.graph.output)
    body = GraphBody(forward.opset, forward.names())
    seed = _seed(forward, body, loss)
    found = differentiate(forward, body, {loss: seed}, wanted)
    taken = forward.names()
    gradients = [_gradient(forward, body, name, found[name], taken) for name in wanted]
    append(forward, body, gradients)
    graph = forward.again(variable, {seed.name, *outputs, *ends})
    passes.tidy(graph)
    keep(graph.graph.initializer, [each for each in graph.graph.initializer if each.name not in given])
    keep(graph.graph.input, inputs)
    names = {name: each.name for name, each in zip(wanted, gradients, strict=True)}
    return Differentiated(graph.again(variable, graph.kept), outputs, names)


def _seed(forward: Graph, body: GraphBody, loss: str) -> Value:
    """The gradient of the loss with respect to itself, an initializer: 1 in the loss's type and shape."""
    dtype, sizes = forward.element_type(loss) or TensorProto.FLOAT, forward.sizes(loss)
    if dtype not in FLOATS:
        raise ValueError(f"the loss {loss!r} has elements of type {TensorProto.DataType.Name(dtype)}, expected floats")
    if sizes is None:
        body.scope(loss + SUFFIX)
        value = Value(body, loss, dtype, None)
        return body.declare(body.number(1, value).expand(value.shape()), dtype, None)
    if any(size != 1 for size in sizes):
        shape = ", ".join("?" if size is None else str(size) for size in sizes)
        raise ValueError(
            f"the loss {loss!r} has shape ({shape}), expected one number: a loss of the model's outputs, or a block "
            "such as ReduceMean that reduces it"
        )
    name = body.free(loss + SUFFIX)
    body.initializers.append(helper.make_tensor(name, dtype, [1] * len(sizes), [1.0]))
    return Value(body, name, dtype, sizes)


def _gradient(
    forward: Graph, body: GraphBody, name: str, gradient: Value, taken: Collection[str]
) -> onnx.ValueInfoProto:
    """The output with a gradient, whose name is that of the value with `_grad` behind it. taken: the graph's names."""
    wanted = name + SUFFIX
    new = {RESET, wanted, *(name + suffix for suffix in (BUFFER_SUFFIX, RESULT_SUFFIX))}
    if both := new.intersection(taken):
        raise ValueError(
            f"the model has {listed(sorted(both))} already: expected a model without gradients, no training graph"
        )
    if gradient.name != wanted:
        body.nodes.append(helper.make_node("Identity", [gradient.name], [wanted], f"{wanted}/Identity"))
    dtype = forward.element_type(name) or TensorProto.FLOAT
    return helper.make_tensor_value_info(wanted, dtype, forward.sizes(name))

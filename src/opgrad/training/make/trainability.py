"""Analyses an ONNX model before artifacts are made: what can be trained, for which losses, and what prevents it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from opgrad.onnx.gradients.differentiation import outlook
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FLOATS, domain_of, opset_of, size_of
from opgrad.onnx.passes.attention import Recognition
from opgrad.training.files.artifact_set import RESET, RESHAPING
from opgrad.training.files.dataset import show
from opgrad.training.files.tensor_values import Held
from opgrad.training.make import forms
from opgrad.training.make.checks import check_built, refused_inputs, refused_types
from opgrad.training.make.named_blocks import Loss
from opgrad.training.make.outputs import cut_maps
from opgrad.training.make.selection import Candidates, no_weights, reaching
from opgrad.training.make.tensors import part_statistics

TAKING = ("MatMul", "Gemm", "Conv", "ConvTranspose")  # operators whose second input are weights
OF_CLASSES = (Loss.CrossEntropyLoss, Loss.NLLLoss)  # losses whose labels are numbers of classes
DISTANCES = (Loss.MSELoss, Loss.L1Loss, Loss.HuberLoss, Loss.SmoothL1Loss)
# For a function the loss that applies it itself, and so takes the input of that function.
APPLIED_BY = {"Softmax": Loss.CrossEntropyLoss, "Sigmoid": Loss.BCEWithLogitsLoss}


@dataclass(frozen=True)
class Output:
    """An output that a loss could take.

    losses: the losses that it fits. hint: advice for the user; None if there is none.
    arrays: for each loss the array that it wants beside the model's inputs, by name, dtype and shape in words.
    """

    name: str
    losses: list[str]
    hint: str | None = None
    arrays: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trainability:
    """The results of the analysis of a model.

    opset, nodes: the version of ai.onnx, and the number of nodes.
    trainable: the weights on which an output depends. frozen: statistics of normalization. unused: other weights.
    constants: the kinds of the other float tensors with several elements, by name; an example are sinusoidal positions.
    modules: further names of weights, which patterns match: those that they would have in the modules that read them.
    shared: the layers that read a weight, where there are several: paths of modules, or nodes.
    numbers: the number of elements of the trainable weights.
    outputs: the outputs of float type.
    problems: the reasons why it cannot be trained, with a line for each node that has no gradient.
    as_inputs: inputs that a node uses as weights; they can only be trained if they become initializers.
    attention: for each softmax before a product, whether training makes one node of the attention there, or why not.
    cut: for outputs of maps, which are cut off, the tensors that are outputs in their places.
    turned: trainable weights that are the transposes of other ones, each with that.
    """

    opset: int = 0
    nodes: int = 0
    trainable: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)
    modules: dict[str, list[str]] = field(default_factory=dict)
    shared: dict[str, list[str]] = field(default_factory=dict)
    numbers: int = 0
    outputs: list[Output] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    as_inputs: list[str] = field(default_factory=list)
    attention: list[Recognition] = field(default_factory=list)
    cut: dict[str, str] = field(default_factory=dict)
    turned: dict[str, str] = field(default_factory=dict)


def trainability(model: onnx.ModelProto, apart: dict[str, Held] | None = None) -> Trainability | None:
    """Analyse a model; None for a training graph.

    model: changed. apart: the values of initializers that are placeholders.
    """
    if any(each.name == RESET for each in model.graph.input):
        return None
    opset, nodes, apart = opset_of(model), len(model.graph.node), apart or {}
    try:
        check_built(model)
        forms.normalize(model)
    except (NotImplementedError, ValueError) as error:
        return Trainability(opset, nodes, problems=[str(error)])
    part_statistics(model, apart)
    cut = cut_maps(model)
    candidates = Candidates(model, apart)
    forward = candidates.graph or Graph(model)
    floats = [each.name for each in model.graph.output if forward.element_type(each.name) in (None, *FLOATS)]
    depended = set().union(*(reaching(forward, name) for name in floats))
    trainable = [name for name in candidates.weights if name in depended]
    known = {*candidates.weights, *candidates.statistics, *candidates.fixed}
    several = ((name, each) for name, each in candidates.tensors.items() if name not in known and size_of(each) > 1)
    constants = {name: "a constant" for name, each in several if each.data_type in FLOATS}
    problems, attention = [], list[Recognition]()
    if not candidates.weights:
        problems = [no_weights(model)]
    elif not trainable:
        problems = ["no output of float type depends on a weight of the model"]
    else:
        try:
            problems, attention = outlook(model, floats, trainable)
        except (NotImplementedError, ValueError) as error:
            problems = [str(error)]
    refusals = (refused_types(candidates.tensors[name].data_type for name in trainable), refused_inputs(model.graph))
    return Trainability(
        opset=opset,
        nodes=nodes,
        trainable=trainable,
        frozen=candidates.statistics,
        unused=[name for name in candidates.weights if name not in depended],
        constants={**candidates.fixed, **constants, **dict.fromkeys(candidates.numbers, "one number")},
        modules=candidates.modules,
        shared=candidates.shared,
        numbers=sum(size_of(candidates.tensors[name]) for name in trainable),
        outputs=[_output(forward, name) for name in floats],
        problems=[*problems, *filter(None, refusals)],
        as_inputs=_as_inputs(forward),
        attention=attention,
        cut=cut,
        turned=dict(candidates.turned(trainable)),
    )


def _as_inputs(forward: Graph) -> list[str]:
    """The names of inputs of fixed sizes that a node uses as weights, such as those of an adapter."""
    fixed = {
        each.name
        for each in forward.graph.input
        if each.type.tensor_type.elem_type in FLOATS
        and len(each.type.tensor_type.shape.dim) > 1
        and all(size.dim_value > 0 for size in each.type.tensor_type.shape.dim)
    }
    found = [name for node in forward.graph.node if node.op_type in TAKING for name in node.input[1:2] if name in fixed]
    data = {node.input[0] for node in forward.graph.node if node.op_type in TAKING and node.input}
    return [name for name in dict.fromkeys(found) if name not in data]


def softmax_before_loss(model: onnx.ModelProto) -> tuple[str, str] | None:
    """Probabilities that a cross-entropy takes as scores by mistake, and the input of their softmax; None without."""
    losses = [node for node in model.graph.node if node.op_type == "SoftmaxCrossEntropyLoss" and node.input]
    if not losses:
        return None
    forward = Graph(model)
    for node in losses:
        name, maker = node.input[0], forward.producers.get(node.input[0])
        while maker is not None and maker.op_type in RESHAPING:
            name, maker = maker.input[0], forward.producers.get(maker.input[0])
        function, source = _function(forward, maker)
        if function == "Softmax":
            return name, source
    return None


def _function(forward: Graph, node: onnx.NodeProto | None) -> tuple[str, str]:
    """The function that a node applies, and its input; a softmax may consist of several nodes."""
    if node is None or domain_of(node):
        return "", ""
    if node.op_type == "Div":
        scores = _softmax_of(forward, *node.input)
        return ("Softmax", scores) if scores else ("Div", node.input[0])
    if node.op_type == "Log":
        before, scores = _function(forward, forward.producers.get(node.input[0]))
        return ("LogSoftmax", scores) if before == "Softmax" else ("Log", node.input[0])
    return node.op_type, node.input[0] if node.input else ""


def _softmax_of(forward: Graph, dividend: str, divisor: str) -> str | None:
    """x if a quotient is exp(x) / sum(exp(x)), where x may be shifted by its maximum first; else None."""
    exponential, total = forward.producers.get(dividend), forward.producers.get(divisor)
    if exponential is None or total is None or (exponential.op_type, total.op_type) != ("Exp", "ReduceSum"):
        return None
    if total.input[0] != dividend:
        return None
    shifted = forward.producers.get(exponential.input[0])
    largest = forward.producers.get(shifted.input[1]) if shifted is not None and shifted.op_type == "Sub" else None
    if shifted is not None and largest is not None and largest.op_type == "ReduceMax":
        return shifted.input[0] if largest.input[0] == shifted.input[0] else exponential.input[0]
    return exponential.input[0]


def _output(forward: Graph, name: str) -> Output:
    """An output, with the losses that fit it by its shape and by the function that computes it."""
    node, sizes = forward.producers.get(name), forward.sizes(name)
    operator, source = _function(forward, node)
    if sizes is not None and all(size == 1 for size in sizes):
        return Output(name, [], "one number: it may be the loss itself, without --loss")
    axis = 1 if sizes is None or len(sizes) > 3 else len(sizes) - 1  # of the classes
    classes = sizes is None or (len(sizes) > 1 and sizes[axis] != 1)
    hint, losses = None, [*([Loss.CrossEntropyLoss] if classes else []), *DISTANCES, Loss.BCEWithLogitsLoss]
    if loss := APPLIED_BY.get(operator):
        hint = f"{operator} makes it; {loss} takes what it is made of: --loss-input {source!r}"
        losses = list(DISTANCES)
    elif operator == "LogSoftmax":
        losses = [Loss.NLLLoss, Loss.KLDivLoss] if classes else [Loss.KLDivLoss]
    wide = "float64" if forward.element_type(name) == onnx.TensorProto.DOUBLE else "float32"
    labels = None if sizes is None else [*sizes[:axis], *sizes[axis + 1 :]]
    wanted = {True: f"labels int64 {_shown(labels)}", False: f"target {wide} {_shown(sizes)}"}
    return Output(name, list(losses), hint, {each: wanted[each in OF_CLASSES] for each in losses})


def _shown(sizes: Sequence[int | str | None] | None) -> str:
    return "of any shape" if sizes is None else show(["?" if size is None else size for size in sizes])

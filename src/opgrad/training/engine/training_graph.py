"""Training graphs: fused, opened in onnxruntime, and run on parameters and gradients in fixed memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.loading import Source as Source
from opgrad.onnx.graph.loading import check_sizes
from opgrad.onnx.graph.loading import read_model as read_model
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of
from opgrad.onnx.graph.sizes import are_equal
from opgrad.onnx.passes.patterns import LOSS, LOSS_AND_GRADIENT, LOSS_GRADIENT, fuse_with_gradient, use_internal_losses
from opgrad.onnxruntime import LOWERED, loading, lower, private
from opgrad.training.engine import first_run
from opgrad.training.engine.binding import BoundGraph, declared
from opgrad.training.engine.memory import TrainingMemory
from opgrad.training.files.dataset import TensorSpec


def open_session(model: onnx.ModelProto, options: onnxruntime.SessionOptions, who: str) -> onnxruntime.InferenceSession:
    """A session with opgrad's operators; operators without a kernel are lowered where that is possible.

    who: the caller, and the name of the model, for messages.
    Raises NotImplementedError, which names the operator, if nobody has it, and ValueError if onnxruntime finds the
    model wrong, or if a value would be larger than `check_sizes` allows.
    """
    missing: list[str] = []
    folds = check_sizes(model, who)
    while True:
        try:
            return loading.open_session(model.SerializeToString(), options, who, folds=folds)
        except ValueError as error:
            operator = private.unknown_operator(error)
            if operator is None:
                raise
            name = operator.rpartition(":")[2]
            if name not in LOWERED or name in missing:
                lack = f"{who}: the graph has the operator {operator}, which neither onnxruntime nor opgrad has"
                raise NotImplementedError(lack) from None
            missing.append(name)
            model = lower(model, operators=missing)


def open_bound(
    model: onnx.ModelProto,
    options: onnxruntime.SessionOptions,
    who: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    fixed: Mapping[str, np.ndarray],
    written: Mapping[str, np.ndarray],
) -> BoundGraph:
    """A session that is bound to memory, see `BoundGraph`; its first run compiles all kernels that are missing."""
    first = partial(first_run.first_run, model, options=options)
    return BoundGraph(open_session(model, options, who), inputs, outputs, fixed, written, who, first)


def open_training(
    model: onnx.ModelProto,
    gradients: Mapping[str, str],
    memory: TrainingMemory,
    constants: Mapping[str, np.ndarray],
    options: onnxruntime.SessionOptions,
    who: str,
    fuse: bool = True,
) -> BoundGraph:
    """A training graph that reads parameters from memory, and writes the gradients of a batch there.

    model: the graph, which is changed. gradients: by parameter, the output with its gradient. memory: the parameters
    and gradients. constants: the values of other inputs that are those of no batch.
    options: onnxruntime's session options. fuse: whether `fuse_nodes` replaces nodes.
    """
    fixed = {**memory.parameters, **memory.tables, **memory.frozen, **constants}
    written = {output: memory.gradients[name] for name, output in gradients.items()}
    inputs = [declared(value) for value in model.graph.input if value.name not in fixed]
    outputs = [declared(value) for value in model.graph.output if value.name not in written]
    if fuse:
        fuse_nodes(model)
    use_internal_losses(model)
    # Replace ConcatTraining by Concat if nothing reads the parts' lengths: onnxruntime can then infer shapes early.
    used = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    for node in model.graph.node:
        if node.op_type == "ConcatTraining" and not used.intersection(node.output[1:]):
            node.op_type, node.domain = "Concat", ""
            del node.output[1:]
    first_run.begin(model, options)
    return open_bound(model, options, who, inputs, outputs, fixed, written)


def session_options(threads: int, patterns: bool = True) -> onnxruntime.SessionOptions:
    """Session options for so many threads; they turn off logging, which would repeat the texts of exceptions.

    Products with weights that DequantizeLinear unpacks take floats: by itself onnxruntime rounds the other operand to 8
    bits where it makes MatMulNBits of them.
    patterns: whether a run takes its memory in one piece, of a size that is found for each shape of the inputs. Where
    shapes vary, pieces of several sizes stay: 1.6 GB in place of 1.1 for a model of 135 million weights.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.enable_mem_pattern = patterns
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return options


# --- fusions of nodes into fewer or faster ones, before onnxruntime loads the graph ---


# The ratio with which DropoutGrad sets to 0 what the mask leaves out and keeps the rest as it is: its factor
# 1 / (1 - ratio) is rounded to 1. With a ratio of 0 it would ignore the mask.
TINY_RATIO = 2.0**-60


@dataclass(frozen=True)
class Fused:
    """A fusion: the operators that were replaced, and the operator in their place."""

    operators: tuple[str, ...]
    by: str


def fuse_nodes(model: onnx.ModelProto) -> list[Fused]:
    """Apply all fusions to a training graph, in place; returns those that were applied, in the order of the graph.

    * SoftmaxCrossEntropyLoss and its gradient become one node, which reads the logits once, if only that gradient reads
    the log-probabilities, and the gradient of the loss itself is 1.
    * Where with a float32 array, a mask of its shape and 0, as in the gradient of Clip, becomes DropoutGrad, which
      takes a tenth of the time of onnxruntime's Where.
    """
    if not any(node.op_type in PASSES for node in model.graph.node):
        return []
    graph = Graph(copied(model), overridable(model))
    found = list(_replaced(graph))
    if found:
        graph.commit()
        model.CopyFrom(graph.model)
    return found


def _replaced(graph: Graph) -> Iterator[Fused]:
    for node in list(graph.nodes()):
        replace = PASSES.get(node.op_type)
        done = replace(graph, node) if replace is not None and not domain_of(node) else None
        if done is not None:
            yield done


def _fuse_loss(graph: Graph, node: onnx.NodeProto) -> Fused | None:
    return Fused((LOSS, LOSS_GRADIENT), LOSS_AND_GRADIENT) if fuse_with_gradient(graph, node) else None


def _select(graph: Graph, node: onnx.NodeProto) -> Fused | None:
    mask, values, other = node.input
    alike = graph.sizes(values) and are_equal(graph.sizes(mask), graph.sizes(values))
    if not alike or graph.element_type(values) != TensorProto.FLOAT or graph.scalar(other) != 0.0:
        return None
    ratio = graph.add_constant(np.array(TINY_RATIO, np.float32), f"{node.output[0]}/ratio")
    graph.substitute(node, [graph.node("DropoutGrad", [values, mask, ratio], list(node.output), MICROSOFT)])
    return Fused(("Where",), "DropoutGrad")


PASSES: dict[str, Callable[[Graph, onnx.NodeProto], Fused | None]] = {LOSS: _fuse_loss, "Where": _select}

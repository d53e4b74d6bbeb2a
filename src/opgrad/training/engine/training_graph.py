"""Training graphs: opened in onnxruntime, and run on parameters and gradients in fixed memory."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import onnx
import onnxruntime

from opgrad.onnx.graph.bounds import check_sizes
from opgrad.onnx.graph.loading import Source as Source
from opgrad.onnx.graph.loading import read_model as read_model
from opgrad.onnx.passes.losses import use_internal_losses
from opgrad.onnxruntime import LOWERED, loading, lower, private
from opgrad.training.engine import first_run, fusions
from opgrad.training.engine.binding import BoundGraph, declared
from opgrad.training.engine.memory import TrainingMemory
from opgrad.training.files.batches import TensorSpec


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
    options: onnxruntime's session options. fuse: whether `fusions.fuse` replaces nodes.
    """
    fixed = {**memory.parameters, **memory.tables, **memory.frozen, **constants}
    written = {output: memory.gradients[name] for name, output in gradients.items()}
    inputs = [declared(value) for value in model.graph.input if value.name not in fixed]
    outputs = [declared(value) for value in model.graph.output if value.name not in written]
    if fuse:
        fusions.fuse(model)
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

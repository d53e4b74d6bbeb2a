"""Training graphs: opened in onnxruntime, and run on parameters and gradients in fixed memory."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import onnx
import onnxruntime

from opgrad.onnx.graph.bounds import check_sizes
from opgrad.onnx.graph.loading import Source as Source
from opgrad.onnx.graph.loading import read_model as read_model
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.passes.losses import use_internal_losses
from opgrad.onnxruntime import LOWERED, loading, lower, private
from opgrad.training.engine import first_run, fusions, rewriting
from opgrad.training.engine.binding import BoundGraph, Value, declared
from opgrad.training.engine.memory import TrainingMemory
from opgrad.training.files.batches import TensorSpec
from opgrad.training.files.names import BUFFER_SUFFIX, RESET


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


class TrainingGraph:
    """Computes loss and gradients of a batch, reading parameters from memory and writing gradients there.

    model: the training graph. memory: its parameters and gradients. constants: the values of its other inputs that
    are those of no batch.
    options: onnxruntime's session options.
    fuse: whether `fusions.fuse` replaces nodes.

    inputs, outputs: those of a call, in the graph's order.
    reset: True if the next run replaces the gradients, False if it adds to them. Every run sets it to False. Each of
    the two has a graph and a session of its own: in the first graph the kernels write into the gradients' memory.
    fused: the fusions that were applied.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        memory: TrainingMemory,
        constants: Mapping[str, np.ndarray],
        options: onnxruntime.SessionOptions,
        who: str,
        fuse: bool = True,
    ):
        buffers = {name + BUFFER_SUFFIX: array for name, array in memory.gradients.items()}
        parameters = {**memory.parameters, **memory.tables, **memory.frozen}
        fixed = {**parameters, **constants, **buffers, RESET: np.zeros(1, np.bool_)}
        flags = {name for node in model.graph.node if node.op_type == "InPlaceAccumulatorV2" for name in node.output}
        self.inputs = tuple(declared(value) for value in model.graph.input if value.name not in fixed)
        self.outputs = tuple(declared(value) for value in model.graph.output if value.name not in flags)
        self.reset = True
        self._flag, self._fixed, self._gradients = fixed[RESET], fixed, memory.gradients
        self._options, self._who = options, who
        self._model = copied(model)
        self.fused = fusions.fuse(self._model) if fuse else []
        use_internal_losses(self._model)
        rewriting.simplify_concatenations(self._model.graph)
        self._adding: BoundGraph | None = None
        self._overwriting = self._open_overwriting() or self._open_adding()

    def _open_overwriting(self) -> BoundGraph | None:
        """The graph that replaces gradients, if there is one."""
        model = copied(self._model)
        names = rewriting.overwriting(model)
        if names is None:
            return None
        return self._open(model, {output: self._gradients[name] for name, output in names.items()})

    def _open_adding(self) -> BoundGraph:
        self._adding = self._open(self._model, {})
        return self._adding

    def _open(self, model: onnx.ModelProto, written: Mapping[str, np.ndarray]) -> BoundGraph:
        first_run.begin(model, self._options)
        return open_bound(model, self._options, self._who, self.inputs, self.outputs, self._fixed, written)

    @property
    def bound(self) -> BoundGraph:
        """The graph for the next run, which `reset` chooses; the graph that adds is opened when it is first needed."""
        return self._overwriting if self.reset else self._adding or self._open_adding()

    def replace(self, name: str, array: np.ndarray) -> None:
        """Bind other memory to an input that is not one of a call."""
        self._fixed[name] = array
        for bound in (self._overwriting, self._adding):
            if bound is not None:
                bound.replace(name, array)

    def __call__(self, values: Sequence[Value] | None = None) -> BoundGraph:
        """Compute outputs and gradients; returns the graph that ran, whose `results` are the outputs.

        values: the inputs of a call; None: those that were written to `bound.buffer`.
        """
        bound = self.bound
        self._flag[0] = self.reset
        bound(values)
        self.reset = False
        return bound


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

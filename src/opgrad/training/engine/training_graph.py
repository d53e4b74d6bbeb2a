"""A training graph as stock onnxruntime runs it, bound to the memory of a training: the host's, or a CUDA device's.

Before a graph runs on the CPU with shapes for the first time, the kernels that it needs are compiled in several
processes. On a device runs do not wait for their end: what reads a result does.
"""

import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from opgrad.base.arguments import called
from opgrad.cpu.compiler import processes
from opgrad.cpu.compiler.processes import Progress
from opgrad.cpu.runtime import plan, pool, threads
from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.loading import check_sizes
from opgrad.onnx.graph.messages import FEW_BITS, MICROSOFT, copied, domain_of
from opgrad.onnx.graph.sizes import are_equal
from opgrad.onnx.passes.patterns import LOSS, LOSS_AND_GRADIENT, LOSS_GRADIENT, fuse_with_gradient, use_internal_losses
from opgrad.onnxruntime import LOWERED, compute, loading, lower, private
from opgrad.onnxruntime.sessions import CPU
from opgrad.ops import public_operators
from opgrad.training.engine import device as devices
from opgrad.training.engine.device import Device, DeviceArray, Staging
from opgrad.training.engine.memory import TrainingMemory
from opgrad.training.files.artifact_set import tensor_spec
from opgrad.training.files.dataset import TensorSpec, fits, show

# A smaller input is copied into the bound memory, which takes 0.3 to 2 µs; binding other memory takes 4 µs.
LARGEST_COPIED = 1 << 18
MOST_BUFFERS = 16  # the most buffers of an input, one for each shape of its batches
ANY_RANK = ("of any rank",)
# Types whose integers lie two in a byte, and all of those that are no dtypes of NumPy.
SHARING_BYTES = {f"tensor({onnx.TensorProto.DataType.Name(kind).lower()})": kind for kind in FEW_BITS}
UNKNOWN_TO_NUMPY = ("tensor(bfloat16)", *SHARING_BYTES)

# Operators that compute shapes: onnxruntime, which has them for CUDA, too, runs those nodes on the CPU.
OF_SHAPES = (
    "Shape", "Size", "Gather", "Concat", "Slice", "Squeeze", "Unsqueeze", "Range", "ConstantOfShape", "Cast", "Reshape",
    "Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "ReduceProd", "Equal", "Where", "Expand", "Identity",
)  # fmt: skip

Value: TypeAlias = Any  # np.ndarray | onnxruntime.OrtValue, which mypy does not know
Memory: TypeAlias = Mapping[str, np.ndarray | DeviceArray]  # by the names of inputs or outputs


class _ChangingInput:
    """An input that changes from call to call. device: which reads it; None: the CPU."""

    def __init__(self, spec: TensorSpec, binding: onnxruntime.IOBinding, device: Device | None):
        self.spec, self._device = spec, device
        self._binding = binding
        self._buffers: dict[tuple[int, ...], np.ndarray | Staging] = {}
        self._shape: tuple[int, ...] | None = None  # the shape of the buffer that is bound
        self._buffer: np.ndarray | Staging = np.empty(0)
        self.bound_shape: tuple[int, ...] = ()

    def set(self, value: Value) -> None:
        """Take the input of a call: a large array is bound as it is, a small one copied into bound memory."""
        if not isinstance(value, np.ndarray):
            self._binding.bind_ortvalue_input(self.spec.name, value)
            self._shape, self.bound_shape = None, tuple(value.shape())
            return
        is_plain = value.flags.c_contiguous and value.flags.aligned
        if self._device is None and value.nbytes > LARGEST_COPIED and is_plain:
            self._bind(value)
            self._shape = None
        else:
            np.copyto(self.buffer(value.shape), value)

    def buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        """The memory from which the graph will read the input."""
        if shape != self._shape:
            if shape not in self._buffers:
                if len(self._buffers) == MOST_BUFFERS:
                    self._buffers.clear()
                on = self._device
                self._buffers[shape] = (np.empty if on is None else partial(Staging, on))(shape, self.spec.dtype)
            self._buffer = self._buffers[shape]
            self._bind(self._buffer.array if isinstance(self._buffer, Staging) else self._buffer)
            self._shape = shape
        return self._buffer.to_fill() if isinstance(self._buffer, Staging) else self._buffer

    def send(self) -> None:
        """Begin to copy to the device what was written into its buffer."""
        if isinstance(self._buffer, Staging):
            self._buffer.send()

    def _bind(self, array: np.ndarray | DeviceArray) -> None:
        self.bound_shape = array.shape
        self._binding.bind_input(self.spec.name, *_place(array))


class BoundGraph:
    """A session of a model that reads and writes fixed memory, except for the inputs and outputs of a call.

    The first run on the CPU compiles all kernels that are missing.

    options, title, device: see `open_session`. inputs: the specifications of a call's inputs, in the graph's order.
    outputs: those that a call returns. fixed: the memory of the other inputs, by name. written: the memory of outputs.
    """

    def __init__(
        self, model: onnx.ModelProto, options: onnxruntime.SessionOptions, title: str, inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec], fixed: Memory, written: Memory, device: Device | None = None,
    ):  # fmt: skip
        self._title, self._device = title, device
        self._first = partial(first_run, model, options=options) if device is None else None
        self._options = onnxruntime.RunOptions() if device is not None else None
        if self._options is not None:
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._session = session = open_session(model, options, title, device)
        self._fixed, self._written = dict(fixed), dict(written)  # keeps the memory alive
        self._binding = session.io_binding()
        self._slots = [_ChangingInput(spec, self._binding, device) for spec in self.inputs]
        self._known = {item.name: item for item in session.get_inputs()}
        for name, array in self._fixed.items():
            self.replace(name, array)
        for name, array in self._written.items():
            self._bind_output(name, array)
        scalars = [spec for spec in self.outputs if spec.shape == () and device is None]
        self._scalars = {spec.name: np.zeros((), spec.dtype) for spec in scalars}
        for name, array in self._scalars.items():
            self._bind_output(name, array)
        self._others = [spec.name for spec in self.outputs if spec.name not in self._scalars]

    def replace(self, name: str, array: np.ndarray | DeviceArray) -> None:
        """Bind other memory to a fixed input."""
        self._fixed[name] = array
        if name in self._known:
            _bind(self._binding, self._known[name], array)

    def _bind_output(self, name: str, array: np.ndarray | DeviceArray) -> None:
        self._binding.bind_output(name, *_place(array))

    def __call__(self, values: Sequence[Value]) -> "BoundGraph":
        """Run the graph on the inputs of a call; returns the graph. Raises what `run_error` tells."""
        for slot, value in zip(self._slots, values, strict=True):
            slot.set(value)
        where = ("cpu", 0) if self._device is None else (devices.TYPE, self._device.number)
        for name in self._others:  # bound anew, so that no run writes into results that a caller still holds
            self._binding.bind_output(name, *where)
        try:
            if self._first is None:
                for slot in self._slots:
                    slot.send()
                self._session.run_with_iobinding(self._binding, self._options)
            else:
                fixed = {name: array.shape for name, array in self._fixed.items()}
                with self._first(lambda: fixed | {slot.spec.name: slot.bound_shape for slot in self._slots}) as options:
                    self._session.run_with_iobinding(self._binding, options)
                self._first = None
        except Exception as error:
            raise run_error(error, self._title) from None
        return self

    def loss_ahead(self) -> Callable[[], float]:
        """What returns the first result of the last run, however many follow; on a device it waits for it."""
        array = self._scalars.get(self.outputs[0].name)
        if array is not None or self._device is None:
            return partial(float, (self.results()[0] if array is None else array).item())
        value = self.ort_results()[0]
        return lambda: float(value.numpy().item())

    def results(self) -> list[np.ndarray]:
        """The outputs of the last run, in memory that belongs to the caller."""
        if not self._others:
            return [array.copy() for array in self._scalars.values()]
        return [value.numpy() for value in self.ort_results()]

    def ort_results(self) -> list[onnxruntime.OrtValue]:
        """The same as OrtValues."""
        names = [*self._written, *self._scalars, *self._others]  # in the order in which they were bound
        found = dict(zip(names, self._binding.get_outputs(), strict=True)) if self._others else {}
        for name, array in self._scalars.items():
            found[name] = ort_value(array)
        return [found[spec.name] for spec in self.outputs]


def declared(value: onnx.ValueInfoProto) -> TensorSpec:
    """The name, dtype and shape that a graph declares for a tensor; the shape is `ANY_RANK` if it declares none."""
    spec = tensor_spec(value)
    return spec if value.type.tensor_type.HasField("shape") else replace(spec, shape=ANY_RANK)


def check_inputs(
    specs: Sequence[TensorSpec], values: Sequence[Value], kinds: Any = np.ndarray | onnxruntime.OrtValue
) -> None:
    """Raise TypeError or ValueError unless values of these kinds have the dtypes and shapes that the graph declares."""
    dtype: Any
    for spec, value in zip(specs, values, strict=True):
        if isinstance(value, onnxruntime.OrtValue):
            dtype, shape = np.dtype(tensor_dtype_to_np_dtype(value.element_type())), tuple(value.shape())
        else:
            dtype, shape = getattr(value, "dtype", type(value).__name__), getattr(value, "shape", ())
        if not isinstance(value, kinds) or dtype != spec.dtype:
            raise TypeError(f"{spec.name} is {dtype}, expected an array of {spec.dtype}")
        if spec.shape != ANY_RANK and not fits(shape, spec.shape):
            raise ValueError(f"{spec.name} has shape {shape}, expected {show(spec.shape)}")


def _kind(array: np.ndarray | DeviceArray) -> Any:
    """The dtype of an array as onnxruntime takes it, which knows bfloat16 by ONNX's number alone."""
    return onnx.TensorProto.BFLOAT16 if array.dtype.name == "bfloat16" else array.dtype


def _place(array: np.ndarray | DeviceArray) -> tuple[Any, ...]:
    """An array as bindings take it: the kind of memory, the device, dtype, shape and address."""
    if isinstance(array, DeviceArray):
        return devices.TYPE, array.device.number, _kind(array), array.shape, array.address
    return "cpu", 0, _kind(array), array.shape, array.ctypes.data


def _bind(binding: onnxruntime.IOBinding, declared: Any, array: np.ndarray | DeviceArray) -> None:
    """Bind an array to an input, as a session declares it: bytes to integers of which two lie in one.

    Raises ValueError if there are not as many bytes as these take.
    """
    memory, number, kind, shape, address = _place(array)
    if array.dtype == np.uint8 and declared.type in SHARING_BYTES:
        kind, shape = SHARING_BYTES[declared.type], declared.shape
        if not all(isinstance(size, int) for size in shape) or array.nbytes != -(-math.prod(shape) // 2):
            raise ValueError(f"{declared.name} has {array.nbytes} bytes, expected those of {declared.type} {shape}")
    binding.bind_input(declared.name, memory, number, kind, shape, address)


def borrowed(array: np.ndarray) -> onnxruntime.OrtValue:
    """An OrtValue of an array, which must outlive it; bfloat16, which is no dtype of NumPy's own, goes by its bits."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def run_error(error: Exception, title: str) -> Exception:
    """The exception to raise for a run that failed: ValueError if a kernel refused values or shapes."""
    kind = ValueError if private.node_refused(error) or type(error).__name__ == "InvalidArgument" else RuntimeError
    return kind(f"{title}: {private.reason(error)}")


def run(
    session: onnxruntime.InferenceSession, wanted: Sequence[str] | None, feeds: Mapping[str, Any], title: str
) -> list[np.ndarray]:
    """Run a session as its own `run` does, which takes no array of bfloat16, of two integers in a byte, or of a device.

    title: the name of the model, for messages. Raises what `run_error` tells.
    """
    declared = [each for each in session.get_inputs() if each.name in feeds]
    try:
        on_device = {name for name, array in feeds.items() if isinstance(array, DeviceArray)}
        if not on_device and all(each.type not in UNKNOWN_TO_NUMPY for each in declared):
            found: list[np.ndarray] = session.run(wanted, feeds)
            return found
        binding, held = session.io_binding(), dict(feeds)
        held |= {name: np.ascontiguousarray(feeds[name]) for name in feeds.keys() - on_device}
        for each in declared:
            _bind(binding, each, held[each.name])
        for name in wanted or [each.name for each in session.get_outputs()]:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        return [each.numpy() for each in binding.get_outputs()]
    except Exception as error:
        raise run_error(error, title) from None


def ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    """An OrtValue with a copy of the array.

    It owns its memory: an array that `numpy()` of a borrowing OrtValue returns dangles once the OrtValue is freed.
    """
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    value.update_inplace(array)
    return value


CALLS = (
    compute.compute, compute.close, plan.execute, compute.parallel_for, pool.malloc, pool.free,
    threads.work, threads.run,
)  # fmt: skip
ROWS = 8  # the guess for an open size of a graph; most kernels are chosen by the other sizes


def begin(model: onnx.ModelProto, options: onnxruntime.SessionOptions) -> None:
    """Start to compile the kernels that the graph will probably need, in the background, if the cache is still empty.

    options: the session options that the graph will run with.
    """
    missing = processes.missing(CALLS)
    if missing and (found := processes.compilers()):
        found.add(missing, first=True)
        from opgrad.onnxruntime.needed_kernels import requests

        sizes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
        likely = {name: tuple(size.dim_value or ROWS for size in dims) for name, dims in sizes.items()}
        found.add(requests(model, likely, options))


@contextmanager
def first_run(
    model: onnx.ModelProto, shapes: Callable[[], Mapping[str, tuple[int, ...]]], options: onnxruntime.SessionOptions
) -> Iterator[onnxruntime.RunOptions]:
    """Within the `with` block, the first kernel that the cache lacks starts the compilation of all of the graph's.

    shapes: returns the shapes of the inputs, for which they are compiled. The value of the block is the options of the
    run. After the run onnxruntime frees its arena, knows how much it needs, and allocates one piece for the next run.
    """

    def compile_all() -> None:
        found = processes.compilers()
        if found:
            from opgrad.onnxruntime.needed_kernels import requests

            entries = found.add(requests(model, shapes(), options))
            with bar() as progress:
                found.wait(entries, progress)

    run = onnxruntime.RunOptions()
    if options.enable_cpu_mem_arena:
        run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with processes.before_missing(compile_all):
        yield run


@contextmanager
def bar() -> Iterator[Progress]:
    """A function that shows how many kernels are compiled, in a terminal only."""
    if not (sys.stderr and sys.stderr.isatty()):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Shown

    columns = TextColumn("compiling kernels, once"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Shown(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("")
        yield lambda done, total: shown.update(task, completed=done, total=total)


def open_session(
    model: onnx.ModelProto, options: onnxruntime.SessionOptions, title: str, device: Device | None = None
) -> onnxruntime.InferenceSession:
    """A session with opgrad's operators; operators without a kernel are lowered where that is possible.

    title: the name of the model, for messages. device: where it computes; None: on the CPU. Operators of
    opgrad's that have no CUDA kernel are lowered for a device; a RuntimeWarning names nodes that stay on the CPU.
    Raises NotImplementedError, which names the operator, if nobody has it, and ValueError if onnxruntime finds the
    model wrong, or if a value would be larger than `check_sizes` allows.
    """
    missing: list[str] = []
    folds, providers = check_sizes(model, title), [CPU]
    if device is not None:
        used = {node.op_type for node in model.graph.node}
        cpu = {each.name for op in public_operators().values() if "cuda" not in op.support.backends for each in op.onnx}
        missing = sorted(used & cpu & set(LOWERED))
        model, providers = lower(model, operators=missing) if missing else model, device.providers
        try:
            options.get_session_config_entry(devices.ASSIGNED)
        except RuntimeError:  # it has none yet
            options.add_session_config_entry(devices.ASSIGNED, "1")
    while True:
        try:
            session = loading.open_session(model.SerializeToString(), options, title, folds=folds, providers=providers)
            if device is not None:
                _tell_nodes_elsewhere(session, title)
            return session
        except ValueError as error:
            operator = private.unknown_operator(error)
            if operator is None:
                raise
            name = operator.rpartition(":")[2]
            if name not in LOWERED or name in missing:
                lack = f"{title}: the graph has the operator {operator}, which neither onnxruntime nor opgrad has"
                raise NotImplementedError(lack) from None
            missing.append(name)
            model = lower(model, operators=missing)


def _tell_nodes_elsewhere(session: onnxruntime.InferenceSession, title: str) -> None:
    """Warn of the nodes that run on the CPU, but for those that compute shapes."""
    parts = [each for each in session.get_provider_graph_assignment_info() if each.ep_name == CPU]
    found = Counter(node.op_type for part in parts for node in part.get_nodes() if node.op_type not in OF_SHAPES)
    if found:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(found.items()))
        text = f"nodes that have no CUDA kernel run on the CPU, and their arrays are copied: {names}"
        warnings.warn(f"{called()}: {title}: {text}", RuntimeWarning, stacklevel=2)


def open_training(
    model: onnx.ModelProto, gradients: Mapping[str, str], memory: TrainingMemory, constants: Mapping[str, np.ndarray],
    options: onnxruntime.SessionOptions, title: str, fuse: bool = True,
) -> BoundGraph:  # fmt: skip
    """A training graph that reads parameters from memory, and writes the gradients of a batch there.

    model: the graph, which is changed. gradients: by parameter, the output with its gradient. memory: the parameters
    and gradients. constants: the values of other inputs that are those of no batch.
    options: onnxruntime's session options. fuse: whether `fuse_nodes` replaces nodes.
    """
    fixed, device = {**memory.operands, **constants}, memory.device
    written = {output: memory.gradients.operands[name] for name, output in gradients.items()}
    inputs = [declared(value) for value in model.graph.input if value.name not in fixed]
    outputs = [declared(value) for value in model.graph.output if value.name not in written]
    if fuse:
        fuse_nodes(model, on_device=device is not None)
    use_internal_losses(model)
    # Replace ConcatTraining by Concat if nothing reads the parts' lengths: onnxruntime can then infer shapes early.
    used = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    for node in model.graph.node:
        if node.op_type == "ConcatTraining" and not used.intersection(node.output[1:]):
            node.op_type, node.domain = "Concat", ""
            del node.output[1:]
    if device is None:
        begin(model, options)
    return BoundGraph(model, options, title, inputs, outputs, fixed, written, device)


def session_options(threads: int, patterns: bool = True) -> onnxruntime.SessionOptions:
    """Session options for so many threads; they turn off logging, which would repeat the texts of exceptions.

    Activations stay float32: onnxruntime would round them to 8 bits where it makes MatMulNBits of DequantizeLinear.
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


@dataclass(frozen=True)
class Fused:
    """A fusion: the operators that were replaced, and the operator in their place."""

    operators: tuple[str, ...]
    by: str


def fuse_nodes(model: onnx.ModelProto, on_device: bool = False) -> list[Fused]:
    """Apply all fusions to a training graph, in place; returns those that were applied, in the order of the graph.

    * SoftmaxCrossEntropyLoss and its gradient become one node, which reads the logits once, if only that gradient reads
    the log-probabilities, and the gradient of the loss itself is 1.
    * Where with a float32 array, a mask of its shape and 0, as in the gradient of Clip, becomes FakeQuantGrad,
      which takes a tenth of the time of onnxruntime's Where on the CPU.
    """
    if not any(node.op_type in (LOSS, "Where") for node in model.graph.node):
        return []
    graph, found = Graph(copied(model), overridable(model)), []
    for node in [node for node in graph.nodes() if not domain_of(node)]:
        if node.op_type == LOSS and fuse_with_gradient(graph, node):
            found.append(Fused((LOSS, LOSS_GRADIENT), LOSS_AND_GRADIENT))
        elif node.op_type == "Where" and not on_device and _select(graph, node):
            found.append(Fused(("Where",), "FakeQuantGrad"))
    if found:
        graph.commit()
        model.CopyFrom(graph.model)
    return found


def _select(graph: Graph, node: onnx.NodeProto) -> bool:
    """Make FakeQuantGrad of a Where that sets to 0 what a mask leaves out; returns whether it is one."""
    mask, values, other = node.input
    alike = graph.sizes(values) and are_equal(graph.sizes(mask), graph.sizes(values))
    if not alike or graph.element_type(values) != TensorProto.FLOAT or graph.scalar(other) != 0.0:
        return False
    graph.substitute(node, [graph.node("FakeQuantGrad", [values, mask], list(node.output), MICROSOFT)])
    return True

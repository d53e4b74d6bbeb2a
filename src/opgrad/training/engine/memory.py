"""The memory of a training: parameters, gradients and the optimizer's state; and the optimizer's step over them.

AdamW and gradient descent change flat arrays in passes over parts, in several threads, or on a CUDA device. Of
embedding tables a step may change only the rows that a batch has read.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper

from opgrad.base.arguments import ArgumentError
from opgrad.call import optim
from opgrad.call.operators import gather_grad
from opgrad.cpu.kernels import optimizer as kernels
from opgrad.cpu.kernels.several import sum_squares
from opgrad.cpu.programs.optimizer import AdamWStep, adamw_in_place, sgd_in_place
from opgrad.cpu.runtime.plan import Address, Pass, ceil_div, per_part
from opgrad.cuda import PARTS
from opgrad.onnx.graph.conversion import is_half
from opgrad.onnx.graph.messages import keep
from opgrad.onnx.graph.nodes import reads_values
from opgrad.training.engine.device import Device, DeviceArray
from opgrad.training.engine.distributed import OneProcess
from opgrad.training.files import mapped_files
from opgrad.training.files.artifact_set import AdamWRule, Rule, SGDRule, settings_of
from opgrad.training.files.checkpoint import Checkpoint, OptimizerGroup
from opgrad.training.files.weights import MOMENTS
from opgrad.training.make.tensors import matching, name_in_module

# A pass over fewer bytes runs in one thread. After a run of the graph onnxruntime's threads keep spinning, so that
# threads of the optimizer wait for a core, and the next run waits for them. With two threads on two cores an optimizer
# step of 0.1 ms took 2.2 ms between runs, and the graph 5.6 ms instead of 3.8 (ViT, 1.0 million parameters). A step of
# 2.7 ms took no longer between runs, but the graph took 27 ms instead of 21 (GPT-2, 5.8 million parameters).
LEAST_SHARED_BYTES = 1 << 27


Flat: TypeAlias = Any  # np.ndarray | DeviceArray [n], with the same operations


def zeros_like(flat: Flat) -> Flat:
    return flat.device.array(flat.shape) if isinstance(flat, DeviceArray) else np.zeros_like(flat)


class GradientNorm:
    """The Euclidean norm of all gradients together, summed in float64; the same with any number of threads.

    gradients: float32 or float64 [n], or float32 on a device; read by every call.
    """

    def __init__(self, gradients: Flat):
        if isinstance(gradients, DeviceArray):
            self._sums: Flat = gradients.device.array((PARTS,), np.float64)
            self._pass: Callable[[], None] = gradients.device.run("squares", (gradients, self._sums))
            return
        parts = ceil_div(gradients.size, per_part(gradients.size, gradients.nbytes))
        self._sums = np.zeros(parts)
        sums = Address(self._sums.ctypes.data, "float64")
        arguments = {"partial": sums, "first": 0}
        self._pass = Pass(sum_squares, [gradients], lambda given: {"x": given[0], **arguments}, LEAST_SHARED_BYTES)

    def measure(self, squares: float = 0.0) -> float:
        """The norm of the gradients as they are now. squares: the sum of the squares of further gradients."""
        self._pass()
        return math.sqrt(float(np.asarray(self._sums).sum()) + squares)


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by so that their norm is at most `max_norm`; NaN for a NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1 else factor


class FlatOptimizer:
    """The optimizer of all parameters at once, by one pass of a kernel over memory.

    rule: an `SGDRule`, p -= learning_rate * g, or an `AdamWRule`, with the moments m and v, which start at 0; t counts
        the steps from 1.
    parameters: float32 or float64 [n], or float32 on a device; changed by every step.
    gradients: the same dtype [n], read by every step; clipped in place first if the rule has a `max_norm`.
    learning_rate: an attribute, which may be set at any time.

    steps: how many steps there have been. moments: like the parameters, by the names that checkpoints have for them.

        g *= min(1, max_norm / (|g| + 1e-6))    (with max_norm)
        m = alpha * m + (1 - alpha) * g
        v = beta * v + (1 - beta) * g * g
        c1, c2 = 1 - alpha**t, 1 - beta**t      (1 without correct_bias)
        adam_mode 0:  p *= 1 - learning_rate * weight_decay
                      p -= learning_rate / c1 * m / (sqrt(v / c2) + epsilon)
        adam_mode 1:  p -= learning_rate * sqrt(c2) / c1 * m / (sqrt(v) + epsilon)
                      p *= 1 - learning_rate * weight_decay

    Source: Decoupled Weight Decay Regularization, arXiv 1711.05101; AdamWOptimizer of com.microsoft.
    """

    __slots__ = ("__weakref__", "_factors", "_norm", "_pass", "learning_rate", "moments", "rule", "steps")

    def __init__(self, rule: Rule, parameters: Flat, gradients: Flat, learning_rate: float):
        self.rule, self.learning_rate, self.steps = rule, learning_rate, 0
        self._factors = np.ones(kernels.FACTORS)
        kernel, names = (kernels.sgd, ()) if isinstance(rule, SGDRule) else (kernels.adamw, MOMENTS)
        self.moments: dict[str, Flat] = {name: zeros_like(parameters) for name in names}
        arrays, factors = (parameters, gradients, *self.moments.values()), self._factors.ctypes.data
        on_device = isinstance(parameters, DeviceArray)
        self._norm = None if on_device or rule.max_norm is None else GradientNorm(gradients)

        def named(operands: Any) -> dict[str, Any]:
            """The CPU kernel's arguments."""
            if isinstance(rule, SGDRule):
                return sgd_in_place(operands, factors)
            return adamw_in_place(operands, rule.alpha, rule.beta, factors)

        self._pass: Callable[[], None] = (
            parameters.device.step(kernel.function.__name__, arrays, self._factors, rule)
            if on_device
            else Pass(kernel, arrays, named, LEAST_SHARED_BYTES)
        )

    def step(self, squares: float = 0.0) -> float:
        """Change the parameters, and the moments if there are some, in place.

        squares: the sum of the squares of other parameters' gradients, which count for the norm.
        Returns the factor by which all gradients are clipped.
        """
        if self._norm is not None and self.rule.max_norm is not None:
            self._factors[kernels.CLIP] = clip_factor(self._norm.measure(squares), self.rule.max_norm)
        self.steps += 1
        if isinstance(self.rule, SGDRule):
            self._factors[kernels.RATE] = self.learning_rate
        else:
            step = AdamWStep(float(self.learning_rate), self.steps, *settings_of(self.rule).values())
            self._factors[: kernels.CLIP] = step.factors()
        self._pass()
        return float(self._factors[kernels.CLIP])


Rows: TypeAlias = tuple[np.ndarray, np.ndarray]  # indices of rows, and the gradient of each
Lookups: TypeAlias = Mapping[str, Rows]  # by table
KINDS = "parameter that is trained", "table that is trained"  # what names are of, and what patterns match
INDICES, GRADIENT = "_rows.indices", "_rows.gradient"  # behind a table's name: outputs of the graph


def expose(model: onnx.ModelProto, gradients: dict[str, str], given: Sequence[str]) -> list[str]:
    """Replace each table's gradient in a training graph by two outputs: the indices, and the gradient of the rows.

    gradients: names of the gradients by parameter; those of the tables go.
    given: names of tables, or patterns that match some. Returns the names of the tables.
    Raises ValueError for a name that is no parameter with a gradient, a pattern that matches no table, and a table that
    is not read by exactly one Gather along its first axis; one that is tied to another layer is read more than once.
    """
    if not given:
        return []
    trained = list(gradients)
    modules: dict[str, list[str]] = {}  # of tables alone
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in trained:
            known = name_in_module(node.input[0], node, 0)
            modules.setdefault(node.input[0], []).extend([known] if known else [])
    named, matched = matching("row_wise", given, trained, list(modules), modules, KINDS)
    names = list(dict.fromkeys([*named, *matched]))
    for name in names:
        graph, gradient = model.graph, gradients.pop(name)
        made = [node for node in graph.node if gradient in node.output]
        readers = [node for node in graph.node if name in node.input and reads_values(node)]
        read_once = _is_lookup(readers, "Gather") and list(readers[0].input).count(name) == 1
        if not read_once or not _is_lookup(made, "GatherGrad"):
            kinds = ", ".join(sorted({node.op_type for node in readers}))
            wrong = f"has {name!r}, which is read by {kinds}, expected one Gather along its first axis alone"
            raise ArgumentError("row_wise", wrong)
        _, indices, dy = made[0].input
        graph.node.remove(made[0])
        keep(graph.output, [value for value in graph.output if value.name != gradient])
        graph.node.append(helper.make_node("Cast", [indices], [name + INDICES], to=onnx.TensorProto.INT64))
        graph.node.append(helper.make_node("Identity", [dy], [name + GRADIENT]))
        graph.output.append(helper.make_tensor_value_info(name + INDICES, onnx.TensorProto.INT64, None))
        graph.output.append(helper.make_tensor_value_info(name + GRADIENT, onnx.TensorProto.FLOAT, None))
    return names


def _is_lookup(nodes: Sequence[onnx.NodeProto], kind: str) -> bool:
    """Whether `nodes` is a single node of this kind along the first axis."""
    return len(nodes) == 1 and nodes[0].op_type == kind and all(item.i == 0 for item in nodes[0].attribute)


class RowWise:
    """The steps of row-wise tables, by the rule of the optimizer of the other parameters.

    rest: the optimizer of the other parameters. tables: float32, changed in place.

    moments: by table, arrays like it; the moments of a row stay as they are while no batch reads the row.
    gradients: by table, the rows that the next step changes, rising, and the gradient of each; empty until `sum_up`.
    """

    def __init__(self, rest: FlatOptimizer, tables: Mapping[str, np.ndarray]):
        self._rest, self.tables = rest, tables
        self.gradients: dict[str, Rows] = {}
        self.moments = {name: {each: np.zeros_like(table) for each in rest.moments} for name, table in tables.items()}
        self._last: Lookups = {}
        self._kept: list[Lookups] = []

    def give(self, found: Mapping[str, np.ndarray]) -> None:
        """Take the indices and gradients of a batch from the outputs of its run, in place of the last batch's."""
        self._last = {name: (found[name + INDICES], found[name + GRADIENT]) for name in self.tables}

    def keep(self, weight: float) -> None:
        """Add the last batch's gradient, times `weight`, to the gradient of the next step."""
        for _, dy in self._last.values():
            np.multiply(dy, np.float32(weight), out=dy)
        self._kept.append(self._last)
        self._last = {}

    def sum_up(self) -> None:
        """Form the gradient of the next step, unless it is there: the sum of the kept ones and the last batch's."""
        if not self.gradients:
            parts, self._kept = [each for each in (*self._kept, self._last) if each], []
            self.gradients = {name: self._summed(name, [part[name] for part in parts]) for name in self.tables}

    def add_up(self, processes: OneProcess) -> None:
        """Replace the gradient of the next step by the sum over all processes, which has the same bits on each."""
        self.sum_up()
        for name, (rows, values) in self.gradients.items():
            parts = zip(processes.gather(rows), processes.gather(values), strict=True)
            self.gradients[name] = self._summed(name, list(parts))

    def _summed(self, name: str, parts: Sequence[Rows]) -> Rows:
        """The rows that indices of several parts name, and the sum of the gradients of each."""
        shape = self.tables[name].shape
        indices = np.concatenate([np.empty(0, np.int64), *(indices.reshape(-1) for indices, _ in parts)])
        dy = np.concatenate([np.empty((0, *shape[1:]), np.float32), *(dy.reshape(-1, *shape[1:]) for _, dy in parts)])
        rows, values = gather_grad(shape, indices, dy, sparse=True)
        return rows, values

    def squares(self) -> float:
        """The sum of the squares of the next step's gradients, for the norm of all gradients together."""
        self.sum_up()
        return sum(float(np.square(values, dtype=np.float64).sum()) for _, values in self.gradients.values())

    def step(self, factor: float) -> None:
        """Change the rows along their gradients, after the step of the other parameters.

        factor: by which that step has clipped the gradients.
        """
        self.sum_up()
        rule, rate = self._rest.rule, float(self._rest.learning_rate)
        for name, (rows, values) in self.gradients.items():
            table, clipped = self.tables[name], values if factor == 1 else values * np.float32(factor)
            if isinstance(rule, AdamWRule):
                first, second = (self.moments[name][each] for each in MOMENTS)
                optim.adam_rows(table, first, second, rows, clipped, rate, self._rest.steps, **settings_of(rule))
            else:
                optim.sgd_rows(table, rows, clipped, rate)
        self.gradients = {}


GROUP = "group0"  # the name of the only group of parameters in checkpoints of onnxruntime-training

Arrays = Mapping[str, np.ndarray]


LINE = 64  # bytes of a cache line


class FlatTensors(Mapping[str, np.ndarray]):
    """Named float32 arrays that lie one behind the other in one array.

    shapes: by name, in the order in which they lie. Each starts on a cache line, with zeros before the next.
    device: where they lie; None: in the host's memory, as views; reading a device's gives a read-only copy.

    flat: float32 [n], the memory of all of them. operands: each of them, where it lies.
    extended: float32 [n + 1], the same memory with one further number behind it; of a device this number alone.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: Device | None = None):
        item = np.dtype(np.float32).itemsize
        sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items()}
        self._starts, end = dict[str, int](), 0
        for name, size in sizes.items():
            self._starts[name] = end
            end += -(-size * item // LINE) * LINE // item
        self.shapes = dict(shapes)
        if device is None:
            memory = np.zeros(end + 2 * LINE // item, np.float32)
            skipped = -memory.ctypes.data % LINE // item
            self.flat: Flat = memory[skipped : skipped + end]
            self.extended = memory[skipped : skipped + end + 1]
            self.operands: dict[str, Flat] = dict(self.views_of(self.flat))
        else:
            self.flat, self.extended = device.array((end,)), np.zeros(1, np.float32)
            self.operands = {name: self.flat.part(self._starts[name], shape) for name, shape in shapes.items()}

    def views_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """The same arrays in another flat memory of this size."""
        return {
            name: flat[start : start + math.prod(shape)].reshape(shape)
            for (name, shape), start in zip(self.shapes.items(), self._starts.values(), strict=True)
        }

    def __getitem__(self, name: str) -> np.ndarray:
        found = self.operands[name]
        return found if isinstance(found, np.ndarray) else found.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.operands)

    def __len__(self) -> int:
        return len(self.operands)


class TrainingMemory:
    """Parameters, gradients and optimizer of a training, at addresses that stay the same.

    checkpoint: initial values. Trainable parameters are copied, halves as float32; frozen ones are used as they are.
    unchanged: whether nobody has written into the trainable arrays, so that mapped files may free their pages.
    row_wise: the names of trainable tables of which a step changes some rows alone.

    parameters, gradients: of all trainable parameters except these tables, by name.
    device: where these are; None: in the host's memory.
    frozen: the other parameters. tables: the row-wise tables. rows: the steps of the tables; None without tables.
    optimizer: that of `parameters`; None before `start`.
    nominal: whether the parameters have no values yet; until `shape` is called they have no memory then.
    bound: whether a graph computes the gradients. computed: whether it has done so.
    Raises NotImplementedError for a trainable parameter of another dtype.
    """

    def __init__(self, checkpoint: Checkpoint, unchanged: bool, row_wise: Sequence[str] = ()):
        trainable = checkpoint.trainable
        for name, array in trainable.items():
            if array.dtype != np.float32 and not is_half(array.dtype):
                raise NotImplementedError(f"the parameter {name!r} is {array.dtype}, expected float32")
        self._names, self._loaded = tuple(trainable), checkpoint.optimizers.get(GROUP)
        self.frozen, self.nominal = dict(checkpoint.frozen), checkpoint.nominal
        self.tables = {name: np.array(trainable[name], np.float32, order="C") for name in row_wise}
        self.optimizer: FlatOptimizer | None = None
        self.rows: RowWise | None = None
        self.bound = self.computed = False
        self.device: Device | None = None
        self._copies: dict[str, DeviceArray] = {}  # of frozen parameters, on the device
        self.shape({name: array.shape for name, array in trainable.items() if name not in self.tables})
        for name, view in self.parameters.items():
            view[...] = trainable[name]
            if unchanged:
                mapped_files.release(trainable[name])

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make new memory for trainable parameters of these shapes, and for their gradients."""
        self.parameters, self.gradients = FlatTensors(shapes, self.device), FlatTensors(shapes, self.device)

    def move(self, device: Device, written: Collection[str]) -> None:
        """Move parameters and gradients to a device, and copy the frozen parameters there.

        written: frozen parameters that runs of the graph change.
        Raises NotImplementedError, which names it, for what steps on a device do not have.
        """
        lacks = {f"{name!r} is trained by rows (row_wise)": True for name in self.tables}
        for name, array in self.frozen.items():
            lacks[f"{name!r} is a running statistic of batch normalization"] = name in written
            lacks[f"{name!r} is a weight of {array.dtype}"] = array.dtype.itemsize == 1 and array.dtype != np.bool_
        for what in (what for what, lacking in lacks.items() if lacking):
            raise NotImplementedError(f"{what}, which is not trained on a CUDA device, expected device 'cpu'")
        before, self.device = self.parameters, device
        self.shape(before.shapes)
        self.parameters.flat[...] = before.flat
        self._copies = {name: device.array(each.shape, each.dtype, each) for name, each in self.frozen.items()}

    @property
    def operands(self) -> dict[str, Any]:
        """All parameters by name, where graphs read them: arrays, or what lies on the device."""
        return {**self.parameters.operands, **self.tables, **self.frozen, **self._copies}

    def write(self, name: str, value: np.ndarray) -> None:
        """Give a parameter a value of its dtype and shape, wherever it lies."""
        for held in (self.parameters.operands, self.tables, self.frozen, self._copies):
            if name in held:
                held[name][...] = value

    @property
    def trainable(self) -> dict[str, np.ndarray]:
        """Every trainable parameter by name, in the order in which they were given."""
        return {name: self.tables[name] if name in self.tables else self.parameters[name] for name in self._names}

    # --- the optimizer ---

    def start(self, rule: Rule, learning_rate: float, group: OptimizerGroup | None = None) -> FlatOptimizer:
        """A new optimizer with this rule. group: the state from which it goes on; None: it begins anew.

        Raises ValueError, with nothing changed, if the moments of the state do not fit the rule or the parameters.
        """
        optimizer = FlatOptimizer(rule, self.parameters.flat, self.gradients.flat, learning_rate)
        if group is not None and optimizer.moments:  # SGD goes on from the state of any optimizer
            self._check(group, optimizer)
        self.optimizer, self.rows = optimizer, RowWise(optimizer, self.tables) if self.tables else None
        if group is not None:
            self._take(group, optimizer)
        return optimizer

    def step(self) -> None:
        """Change the parameters along the gradients."""
        assert self.optimizer is not None
        if self.rows is None:
            self.optimizer.step()
        else:
            self.rows.step(self.optimizer.step(self.rows.squares()))

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """The optimizer's moments by parameter and by their names in a checkpoint; of SGD a moment of zeros.

        onnxruntime-training 1.19.2 loads the state of SGD only if it has a moment for every parameter.
        """
        assert self.optimizer is not None
        flats = {moment: np.asarray(flat) for moment, flat in self.optimizer.moments.items()}
        flats = flats or {MOMENTS[0]: np.zeros(self.parameters.flat.shape, np.float32)}
        views = {moment: self.parameters.views_of(flat) for moment, flat in flats.items()}
        found = {name: {moment: each[name] for moment, each in views.items()} for name in self.parameters}
        for name, kept in self.rows.moments.items() if self.rows is not None else ():
            found[name] = kept or {MOMENTS[0]: np.zeros_like(self.tables[name])}
        return {name: found[name] for name in self._names}

    def restore(self, group: OptimizerGroup) -> None:
        """Let the optimizer go on from a state; a state without moments begins them at 0.

        Raises ValueError, with nothing changed, if the state has moments of other parameters or another optimizer.
        """
        assert self.optimizer is not None
        self._check(group, self.optimizer)
        self._take(group, self.optimizer)

    def _check(self, group: OptimizerGroup, optimizer: FlatOptimizer) -> None:
        """Raise ValueError unless a state has the moments of an optimizer, or none, and a number of steps."""
        if group.step < 0:
            raise ValueError(f"the checkpoint has {group.step} steps of the optimizer, expected at least 0")
        saved = {f"{name}/{moment}": array for name, of in group.moments.items() for moment, array in of.items()}
        names = [*optimizer.moments] or MOMENTS[:1]
        like = {f"{name}/{moment}": array for name, array in self.trainable.items() for moment in names}
        try:
            check_like("moments", saved, like if saved else {})
        except ValueError as error:
            raise ValueError(f"{error}: it was saved with another optimizer or model") from None

    def _take(self, group: OptimizerGroup, optimizer: FlatOptimizer) -> None:
        """Set the steps and the moments of the optimizer to those of a state, where it has some."""
        optimizer.steps = group.step
        kept = [] if self.rows is None else [*self.rows.moments.items()]
        for moment, flat in optimizer.moments.items():
            host = np.asarray(flat)  # of a device, a copy
            views = self.parameters.views_of(host) | {name: each[moment] for name, each in kept}
            for name, view in views.items():
                view[...] = group.moments.get(name, {}).get(moment, 0)
            if host is not flat:
                flat[...] = host

    def group(self) -> OptimizerGroup | None:
        """The state of the optimizer or, without an optimizer, that of the checkpoint; None if there is neither."""
        if self.optimizer is None:
            return self._loaded
        return OptimizerGroup(self.optimizer.steps, self.optimizer.learning_rate, self.moments())

    def checkpoint(self, properties: Mapping[str, int | float | str], with_optimizer: bool = True) -> Checkpoint:
        """The present state as a checkpoint, with the arrays that training changes."""
        group = self.group() if with_optimizer else None
        groups = {} if group is None else {GROUP: group}
        return Checkpoint(self.trainable, dict(self.frozen), groups, dict(properties), self.nominal)


def check_like(what: str, found: Arrays, expected: Arrays) -> None:
    """Raise ValueError unless a checkpoint's arrays have the expected names, dtypes and shapes."""
    if found.keys() != expected.keys():
        names, others = (", ".join(sorted(each)) or "none" for each in (found, expected))
        raise ValueError(f"the checkpoint has the {what} {names}, expected {others}")
    for name, array in found.items():
        other = expected[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            raise ValueError(
                f"the checkpoint's {name!r} is {array.dtype} of shape {array.shape}, "
                f"expected {other.dtype} of shape {other.shape}"
            )

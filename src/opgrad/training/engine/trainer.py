"""`Trainer`: it trains an artifact set step by step, evaluates it and exports the model."""

import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from os import PathLike
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError, ArgumentTypeError, naming, require
from opgrad.cpu.runtime.threads import get_num_threads
from opgrad.onnx.graph.conversion import has_halves, in_float32, rounded, written_inputs
from opgrad.onnx.graph.messages import copied, keep
from opgrad.onnx.graph.nodes import rename_inputs
from opgrad.training.engine.device import opened
from opgrad.training.engine.evaluation import Evaluation, Evaluator
from opgrad.training.engine.export import check_export, export_model
from opgrad.training.engine.memory import GROUP, FlatOptimizer, GradientNorm, TrainingMemory, check_like, expose
from opgrad.training.engine.training_graph import check_inputs, open_training, session_options
from opgrad.training.files import mapped_files
from opgrad.training.files.artifact_set import ArtifactSet
from opgrad.training.files.checkpoint import Checkpoint, OptimizerGroup
from opgrad.training.files.checkpoint_tables import raw
from opgrad.training.files.dataset import Dataset, Examples

DYNAMIC = "dynamic"
FACTOR, INVERSE = "opgrad.loss_scale", "opgrad.loss_scale.inverse"  # inputs of the graph; the first is a property, too
FIRST, LARGEST = 2.0**15, 2.0**24  # factors; float16 holds no larger power of 2 than the first
PATIENCE = 2000  # steps without an overflow after which a dynamic factor is doubled
MOST_SKIPPED = 30  # steps in a row; then it is not the factor, and the step shows what is wrong
UNSCALED_SUFFIX = "_grad.unscaled"  # behind a parameter's name: its gradient in float32


class LossScale:
    """The factor of the loss, and the steps that were skipped.

    given: the factor, or "dynamic": from 2 ** 15, halved when gradients overflow, doubled after 2,000 steps without.

    skipped: how many steps were skipped. factor: the present one.
    Raises ValueError for anything else.
    """

    def __init__(self, given: float | str):
        number = isinstance(given, int | float) and not isinstance(given, bool) and 2.0**-24 <= given <= LARGEST
        require(number or given == DYNAMIC, "loss_scale", given, f"{DYNAMIC!r} or a number from 2**-24 to 2**24")
        self.dynamic, self.skipped = given == DYNAMIC, 0
        self._good = self._in_a_row = 0
        self._arrays, self._most = dict[str, np.ndarray](), FIRST
        self.factor = FIRST if self.dynamic else float(given)

    def inputs(self, kind: "np.dtype[Any]", shape: tuple[int, ...]) -> Mapping[str, np.ndarray]:
        """The memory of the graph's inputs. kind, shape: those of the loss."""
        self._most = FIRST if kind == np.float16 else LARGEST
        if self.factor > self._most:
            raise ArgumentError(
                "loss_scale", f"is {self.factor:g}, expected at most {self._most:g}: the loss is {kind}"
            )
        self._arrays = {FACTOR: np.empty(shape, kind), INVERSE: np.empty((), np.float32)}
        self._set(self.factor)
        return self._arrays

    def _set(self, factor: float) -> None:
        self.factor = factor
        if self._arrays:
            self._arrays[FACTOR][...], self._arrays[INVERSE][...] = factor, 1 / factor

    def takes(self, finite: bool) -> bool:
        """Whether a step shall be made, whose gradients are finite or not; sets the factor of the next one."""
        if finite:
            self._in_a_row, self._good = 0, self._good + 1
            if self.dynamic and self._good >= PATIENCE and self.factor < self._most:
                self._good = 0
                self._set(self.factor * 2)
            return True
        self._good, self._in_a_row = 0, self._in_a_row + 1
        if self._in_a_row > MOST_SKIPPED:
            return True
        self.skipped += 1
        if self.dynamic:
            self._set(self.factor / 2)
        return False

    def to_text(self) -> str:
        """The state as a line of JSON."""
        return json.dumps([self.factor, self.skipped, self._good, self._in_a_row])

    def read(self, text: Any) -> list[Any]:
        """The state in a text of `to_text`, for `restore`. Raises ValueError for another text."""
        with suppress(ValueError, TypeError, RecursionError):
            factor, *counts = json.loads(text)
            right = len(counts) == 3 and all(type(each) is int and each >= 0 for each in counts)
            if right and isinstance(factor, float) and 2.0**-64 < factor <= LARGEST:
                return [factor, *counts]
        raise ValueError(f"the checkpoint's {FACTOR} is {text!r}, expected the state of a loss scale")

    def restore(self, state: list[Any]) -> None:
        """Go on from a state."""
        factor, self.skipped, self._good, self._in_a_row = state
        self._set(factor if self.dynamic else self.factor)


def scaled(model: onnx.ModelProto, gradients: dict[str, str], scale: LossScale) -> Mapping[str, np.ndarray]:
    """Let a training graph that computes in float16 take float32 parameters and give float32 gradients.

    model: changed. Its parameters are rounded to float16 where they are read; the gradient of the loss is an input.
    gradients: names of the gradients by parameter, changed, too.
    Returns the memory of the new inputs. Raises ValueError for a graph that does not compute in float16.
    """
    graph, first = model.graph, f"{model.graph.output[0].name}_grad"
    kinds = {each.name: each.type.tensor_type for each in graph.input}
    halves = [name for name in gradients if kinds[name].elem_type == TensorProto.FLOAT16]
    seed = next((copied(each) for each in graph.initializer if each.name == first), None)
    if not halves or has_halves(model, (TensorProto.BFLOAT16,)):
        raise ArgumentError("loss_scale", "is for graphs that compute in float16, expected none for this one")
    if seed is None:
        raise ArgumentError(
            "loss_scale", f"scales the gradient of the loss, but the graph has no initializer {first!r}"
        )
    keep(graph.initializer, [each for each in graph.initializer if each.name != first])
    names = {name: f"{name}.float16" for name in halves} | {first: FACTOR}
    for node in graph.node:
        rename_inputs(node, names)
    to = TensorProto.FLOAT16
    casts = [helper.make_node("Cast", [name], [names[name]], f"{names[name]}/Cast", to=to) for name in halves]
    keep(graph.node, [*casts, *graph.node])
    outputs = {each.name: each for each in graph.output}
    for name, gradient in list(gradients.items()):
        wide, unscaled = f"{name}{UNSCALED_SUFFIX}.scaled", f"{name}{UNSCALED_SUFFIX}"
        graph.node.append(helper.make_node("Cast", [gradient], [wide], f"{wide}/Cast", to=TensorProto.FLOAT))
        graph.node.append(helper.make_node("Mul", [wide, INVERSE], [unscaled], f"{unscaled}/Mul"))
        gradients[name] = outputs[gradient].name = unscaled
        outputs[gradient].type.tensor_type.elem_type = TensorProto.FLOAT
    for name in halves:
        kinds[name].elem_type = TensorProto.FLOAT
    graph.input.append(helper.make_tensor_value_info(FACTOR, seed.data_type, seed.dims))
    graph.input.append(helper.make_tensor_value_info(INVERSE, TensorProto.FLOAT, []))
    return scale.inputs(helper.tensor_dtype_to_np_dtype(seed.data_type), tuple(seed.dims))


BATCH_ROWS = 512  # rows of a batch in an evaluation


class Trainer:
    """Trains the parameters of an artifact set in stock onnxruntime.

    artifacts: the artifact set; its checkpoint gives the initial parameters.
    learning_rate: that of the optimizer; the attribute of this name changes it between steps.
    options: onnxruntime's session options; by default it uses `opgrad.get_num_threads()` threads.
    row_wise: names or patterns of embedding tables of which a step changes the rows alone that its batches have read;
        each is read by one Gather along its first axis alone.
    fuse: whether nodes such as the loss and its gradient become one; see `opgrad inspect`.
    loss_scale: lets a graph that computes in float16 do so, with the loss multiplied by this number or, with "dynamic",
        by one that is found; None: graphs in float16 and bfloat16 compute in float32.
    device: "cpu", or "cuda" (also "cuda:1") for an NVIDIA GPU with onnxruntime-gpu, in whose memory parameters,
        gradients and moments stay. A RuntimeWarning names nodes that have no CUDA kernel and run on the CPU.

    parameters: every parameter by name, float32 arrays of their present values; the trainable ones may be
        written to between steps. Those of models in float16 and bfloat16 are float32, too, and rounded in an export.
        From a device reading one copies it, and it cannot be written.
    gradients: the gradients of the last batch, by the name of the parameter; those of row-wise tables are not kept.
    statistics: of the parameters, the means and variances of batch normalization, which every gradient updates.
    rows: the steps of row-wise tables; None: there are no such tables.
    loss_scale: the present factor, and how many steps were skipped as it was too large; None: the loss is not scaled.

    A name that a trainer does not have cannot be set: AttributeError.
    Raises NotImplementedError for another device, and for what does not train on a device: row_wise, batch
    normalization whose statistics are updated, frozen weights of 8 bits or fewer; RuntimeError where there is none.
    """

    __slots__ = (
        "__weakref__", "_graph", "_memory", "_norm", "_scales", "artifacts", "evaluator", "gradients", "loss_scale",
        "optimizer", "parameters", "rows", "statistics",
    )  # fmt: skip

    @naming("Trainer")
    def __init__(
        self, artifacts: ArtifactSet, learning_rate: float = 1e-3, options: onnxruntime.SessionOptions | None = None,
        row_wise: Sequence[str] = (), fuse: bool = True, loss_scale: float | str | None = None, device: str = "cpu",
    ):  # fmt: skip
        if not isinstance(artifacts, ArtifactSet):
            raise ArgumentTypeError("artifacts", f"is {type(artifacts).__name__}, expected the set of ArtifactSet.load")
        on = opened(device)
        if options is None:
            options = session_options(get_num_threads())
        self.artifacts = artifacts
        _check_learning_rate(learning_rate)
        self.loss_scale = None if loss_scale is None else LossScale(loss_scale)
        model, constants = artifacts.training(in_halves=loss_scale is not None)
        self._scales: Mapping[str, np.ndarray] = {}
        gradients = dict(artifacts.gradients)
        if self.loss_scale is not None:
            if row_wise:
                raise ArgumentError("loss_scale", "and row_wise, expected one of them")
            self._scales = scaled(model, gradients, self.loss_scale)
            constants = {**constants, **self._scales}
        row_wise = expose(model, gradients, row_wise)
        written = written_inputs(model.graph)
        kinds = {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
        frozen = {
            name: _held(rounded(array, kinds.get(name, 0), name), name in written)
            for name, array in artifacts.frozen.items()
        }
        checkpoint = Checkpoint(dict(artifacts.trainable), frozen)
        memory = self._memory = TrainingMemory(checkpoint, unchanged=True, row_wise=row_wise)
        if on is not None:
            memory.move(on, written)
        self._graph = open_training(model, gradients, memory, constants, options, artifacts.title, fuse)
        self.evaluator = Evaluator(artifacts, options, on)
        self.optimizer: FlatOptimizer = memory.start(artifacts.rule, float(learning_rate))
        self.rows = memory.rows
        trainable, held = memory.parameters, {**memory.tables, **frozen}
        found: Any = {**trainable, **held} if on is None else ChainMap[str, Any](held, trainable)  # type: ignore[arg-type]
        self.parameters: dict[str, np.ndarray] = found
        self.statistics = {name: array for name, array in frozen.items() if name in written}
        self.gradients = memory.gradients
        self._norm = None if self.loss_scale is None else GradientNorm(memory.gradients.flat)

    @property
    def on_device(self) -> bool:
        """Whether it trains on a CUDA device."""
        return self._memory.device is not None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next steps; it is `optimizer.learning_rate`."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    @naming("Trainer.learning_rate")
    def learning_rate(self, value: float) -> None:
        _check_learning_rate(value)
        self.optimizer.learning_rate = float(value)

    def step(self, batch: Mapping[str, np.ndarray]) -> float:
        """Train on one batch and return its loss, as it was before the step.

        batch: an array for every input of the graph, in its dtype and shape.
        Raises ValueError for a missing input, a wrong shape or a label that is no class of the model, and
        TypeError for a wrong dtype; onnxruntime's exceptions carry what else a kernel finds wrong.
        """
        return self.step_ahead(batch)()

    def step_ahead(self, batch: Mapping[str, np.ndarray]) -> Callable[[], float]:
        """Train on one batch like `step`, and return a function that returns its loss.

        On a device the step may go on meanwhile, and the next one be given: the function waits for the loss.
        """
        loss = self._gradients_ahead(batch)
        self.update()
        return loss

    def update(self) -> None:
        """Change the parameters along the gradients; with a scaled loss, not along gradients that are not finite."""
        if self.loss_scale is None or self._norm is None:
            self._memory.step()
            return
        before, takes = self.loss_scale.factor, self.loss_scale.takes(math.isfinite(self._norm.measure()))
        if self.loss_scale.factor != before:
            self._bind_scale()
        if takes:
            self._memory.step()

    def _bind_scale(self) -> None:
        """Give the graph the factor of the loss: a device has a copy of it."""
        for name, array in self._scales.items():
            self._graph.replace(name, array)

    def compute_gradients(self, batch: Mapping[str, np.ndarray]) -> float:
        """Fill `gradients` for one batch and return its loss, like `step`, but leave the parameters alone."""
        return self._gradients_ahead(batch)()

    @naming("Trainer.step")
    def _gradients_ahead(self, batch: Mapping[str, np.ndarray]) -> Callable[[], float]:
        self._check(batch)
        self._check_rows(Dataset(batch, self.artifacts.axes).rows)
        return self._computed(batch)

    def epoch(self, data: Dataset, batch_size: int, order: np.ndarray) -> Iterator[float]:
        """Train on all rows once, yielding the loss of every batch.

        data: arrays in the dtypes and shapes of the graph's inputs.
        batch_size: rows of a batch; the last batch holds what is left.
        order: int64 [n], the rows in the order in which they are taken.
        Raises what `step` raises, and ValueError if `order` names a row that the data do not have.
        """
        for loss in self._batches(data, batch_size, order):
            self.update()
            yield loss()

    @naming("Trainer")
    def _computed(self, batch: Mapping[str, np.ndarray]) -> Callable[[], float]:
        """Fill `gradients`; returns what waits for the loss."""
        bound = self._graph([batch[spec.name] for spec in self.artifacts.inputs])
        if self.rows is not None:
            self.rows.give(dict(zip((spec.name for spec in bound.outputs), bound.results(), strict=True)))
        return bound.loss_ahead()

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise unless there is an array that fits for every input of the graph."""
        for spec in self.artifacts.inputs:
            if spec.name not in arrays:
                raise ValueError(f"{spec.name} is missing, expected an array for every input of the graph")
        check_inputs(self.artifacts.inputs, [arrays[spec.name] for spec in self.artifacts.inputs], np.ndarray)
        self.evaluator.check_labels(arrays)

    def _check_rows(self, rows: int) -> None:
        """Raise ValueError if the graphs do not take batches of so many rows."""
        expected = self.artifacts.batch_rows
        if expected is not None and rows != expected:
            raise ValueError(f"a batch has {rows} rows, expected {expected}, as the graphs say")

    @naming("Trainer.evaluate")
    def evaluate(self, data: Examples, batch_size: int = BATCH_ROWS) -> Evaluation:
        """Loss and accuracy of the present parameters; see `Evaluator`.

        Where the graphs take one number of rows alone, that is the batch size, and the data must be whole batches.
        """
        if isinstance(data, Dataset):
            self._check(data.arrays)
            data = Dataset(data.arrays, self.artifacts.axes)
        batch_rows = self.artifacts.batch_rows
        if batch_rows is not None and data.rows % batch_rows:
            raise ValueError(f"there are {data.rows} rows, expected whole batches of {batch_rows}")
        return self.evaluator.evaluate(data, self._memory.operands, batch_rows or batch_size)

    @naming("Trainer.export")
    def export(self, path: str | PathLike[str]) -> None:
        """Write the model with its present parameters as an ordinary ONNX inference model.

        path: the file. Its inputs are the graph's without the label, its output are the scores that the
        loss was computed from, as the model had them; the loss where there are no scores. It needs no opgrad.
        """
        source, values = self.artifacts, {**self.artifacts.constants, **self.parameters}
        export_model(source.eval_model, source.name, values, self.evaluator.outputs, path)

    def check_export(self) -> None:
        """Raise ValueError if `export` would fail, or give a model that stock onnxruntime does not take."""
        check_export(self.artifacts, self.evaluator.outputs)

    def gradient_batches(self, data: Dataset, batch_size: int, order: np.ndarray) -> Iterator[float]:
        """Fill `gradients` for one batch after the other, like `epoch`, but leave the parameters alone.

        data, batch_size, order: as for `epoch`, which raises the same. Yields the loss of every batch.
        """
        for loss in self._batches(data, batch_size, order):
            yield loss()

    def _batches(self, data: Dataset, batch_size: int, order: np.ndarray) -> Iterator[Callable[[], float]]:
        with naming("Trainer.epoch"):
            self._check(data.arrays)
            data = Dataset(data.arrays, self.artifacts.axes)
            require(batch_size >= 1, "batch_size", batch_size, "at least 1")
            if len(order):
                self._check_rows(min(batch_size, len(order)))
                self._check_rows(len(order) % batch_size or batch_size)
            if order.size and not 0 <= order.min() <= order.max() < data.rows:
                raise ArgumentError("order", f"names other rows, expected 0 to {data.rows - 1}")
        yield from self.gradients_ahead(data, (order[at : at + batch_size] for at in range(0, len(order), batch_size)))

    def gradients_ahead(self, data: Examples, batches: Iterable[np.ndarray]) -> Iterator[Callable[[], float]]:
        """`gradient_batches` for given batches of rows, without its checks; yields what waits for each loss."""
        for rows in batches:
            yield self._computed(data.take(rows).arrays)

    def checkpoint(self, properties: Mapping[str, int | float | str] | None = None) -> Checkpoint:
        """The present state as `write_checkpoint` takes it; its arrays are those that training changes.

        properties: what else the checkpoint shall hold.
        """
        own = {} if self.loss_scale is None else {FACTOR: self.loss_scale.to_text()}
        return self._memory.checkpoint({**(properties or {}), **own})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint: its parameters, and the optimizer's state or, if it has none, a fresh one.

        Frozen parameters that it does not have stay as they are.
        Raises ValueError, with nothing changed, if it is of another model or of another optimizer.
        """
        group = checkpoint.optimizers.get(GROUP, OptimizerGroup(0, self.learning_rate))
        values = {
            name: in_float32(array) if name in self.parameters and self.parameters[name].dtype == np.float32 else array
            for name, array in checkpoint.parameters.items()
        }
        check_like("parameters", self._memory.frozen | values, self.parameters)
        scale, given = self.loss_scale, checkpoint.properties.get(FACTOR)
        state = None if scale is None or given is None else scale.read(given)
        self._memory.restore(group)
        for name, array in values.items():
            self._set(name, array)
        if scale is not None and state is not None:
            scale.restore(state)
            self._bind_scale()

    def _set(self, name: str, value: np.ndarray) -> None:
        """Give a parameter a value; a frozen one that shares its memory with others gets memory of its own."""
        frozen = self._memory.frozen
        if name in frozen and not frozen[name].flags.writeable:
            if np.array_equal(raw(frozen[name]), raw(value)):
                return
            self.parameters[name] = frozen[name] = np.array(value, order="C")
            self._graph.replace(name, self._memory.operands[name])
        self._memory.write(name, value)


def _check_learning_rate(value: float) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ArgumentTypeError("learning_rate", f"is {type(value).__name__}, expected a number")
    require(0 <= value < math.inf, "learning_rate", value, "a finite number of at least 0")


def _held(array: np.ndarray, written: bool) -> np.ndarray:
    """A frozen parameter for a graph: the same memory if it is a mapped file that no run writes into, else a copy."""
    shared = not written and mapped_files.mapping_of(array) is not None and array.flags.c_contiguous
    return array if shared else np.array(array, order="C")

"""The memory of a training: parameters, gradients and the optimizer, which graphs and steps change in place."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from opgrad.onnx.graph.conversion import is_half
from opgrad.training.engine.optimizer import SGD, AdamW, started
from opgrad.training.engine.row_wise import RowWise
from opgrad.training.files import mapped_files
from opgrad.training.files.artifact_set import Rule
from opgrad.training.files.checkpoint import Checkpoint, OptimizerGroup

GROUP = "group0"  # the name of the only group of parameters in checkpoints of onnxruntime-training

Arrays = Mapping[str, np.ndarray]


LINE = 64  # bytes of a cache line


class FlatTensors(Mapping[str, np.ndarray]):
    """Named float32 arrays that lie one behind the other in one array.

    shapes: by name, in the order in which they lie. Each starts on a cache line, with zeros before the next.

    flat: float32 [n], the memory of all of them; each named array is a view of it.
    extended: float32 [n + 1], the same memory with one further number behind it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        item = np.dtype(np.float32).itemsize
        sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = end
            end += -(-size * item // LINE) * LINE // item
        memory = np.zeros(end + 2 * LINE // item, np.float32)
        skipped = -memory.ctypes.data % LINE // item
        self.flat, self.extended = memory[skipped : skipped + end], memory[skipped : skipped + end + 1]
        self._views = {
            name: self.flat[start : start + sizes[name]].reshape(shapes[name]) for name, start in starts.items()
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array, in the order in which they lie."""
        return {name: view.shape for name, view in self._views.items()}

    def views_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """The same arrays in another flat memory of this size."""
        return {
            name: flat[start : start + view.size].reshape(view.shape)
            for name, view in self._views.items()
            for start in ((view.ctypes.data - self.flat.ctypes.data) // self.flat.itemsize,)
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class TrainingMemory:
    """Parameters, gradients and optimizer of a training, at addresses that stay the same.

    who: the caller, for messages.
    checkpoint: initial values. Those of trainable parameters are copied, halves as float32; of the frozen ones these
    arrays are used.
    unchanged: whether nobody has written into the trainable arrays, so that mapped files may free their pages.
    row_wise: the names of trainable tables of which a step changes some rows alone.

    parameters, gradients: of all trainable parameters except these tables, by name.
    frozen: the other parameters. tables: the row-wise tables. rows: the steps of the tables; None without tables.
    optimizer: that of `parameters`; None before `start`.
    nominal: whether the parameters have no values yet; until `shape` is called they have no memory then.
    bound: whether a graph computes the gradients. computed: whether it has done so.
    Raises NotImplementedError for a trainable parameter of another dtype.
    """

    def __init__(self, who: str, checkpoint: Checkpoint, unchanged: bool, row_wise: Sequence[str] = ()):
        trainable = checkpoint.trainable
        for name, array in trainable.items():
            if array.dtype != np.float32 and not is_half(array.dtype):
                raise NotImplementedError(f"{who}: the parameter {name!r} is {array.dtype}, expected float32")
        self._names, self._loaded = tuple(trainable), checkpoint.optimizers.get(GROUP)
        self.frozen, self.nominal = dict(checkpoint.frozen), checkpoint.nominal
        self.tables = {name: np.array(trainable[name], np.float32, order="C") for name in row_wise}
        self.optimizer: SGD | AdamW | None = None
        self.rows: RowWise | None = None
        self.bound = self.computed = False
        self.shape({name: array.shape for name, array in trainable.items() if name not in self.tables})
        for name, view in self.parameters.items():
            view[...] = trainable[name]
            if unchanged:
                mapped_files.release(trainable[name])

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make new memory for trainable parameters of these shapes, and for their gradients."""
        self.parameters, self.gradients = FlatTensors(shapes), FlatTensors(shapes)

    @property
    def trainable(self) -> dict[str, np.ndarray]:
        """Every trainable parameter by name, in the order in which they were given."""
        return {name: self.tables[name] if name in self.tables else self.parameters[name] for name in self._names}

    # --- the optimizer ---

    def start(self, rule: Rule, learning_rate: float, group: OptimizerGroup | None = None) -> SGD | AdamW:
        """A new optimizer with this rule. group: the state from which it goes on; None: it begins anew.

        Raises ValueError if the moments of the state do not fit the rule or the parameters.
        """
        optimizer = started(rule, self.parameters.flat, self.gradients.flat, learning_rate)
        rows = RowWise(optimizer, self.tables) if self.tables else None
        if group is not None:
            moments = self._moments(optimizer, rows)
            if optimizer.moments:  # SGD goes on from the state of any optimizer
                _check_moments("Optimizer", group, moments)
            _restore(optimizer, group, moments)
        self.optimizer, self.rows = optimizer, rows
        return optimizer

    def step(self) -> None:
        """Change the parameters along the gradients."""
        assert self.optimizer is not None
        if self.rows is None:
            self.optimizer.step()
        else:
            self.rows.step(self.optimizer._step_beside(self.rows.squares()))

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """The optimizer's moments by parameter and by their names in a checkpoint."""
        assert self.optimizer is not None
        return self._moments(self.optimizer, self.rows)

    def _moments(self, optimizer: SGD | AdamW, rows: RowWise | None) -> dict[str, dict[str, np.ndarray]]:
        # onnxruntime-training 1.19.2 loads the state of SGD only if it has a moment for every parameter: zeros.
        flats = optimizer.moments or {"momentum0": np.zeros(self.parameters.flat.shape, np.float32)}
        views = {moment: self.parameters.views_of(flat) for moment, flat in flats.items()}
        found = {name: {moment: each[name] for moment, each in views.items()} for name in self.parameters}
        for name, kept in rows.moments.items() if rows is not None else ():
            found[name] = kept or {moment: np.zeros_like(self.tables[name]) for moment in flats}
        return {name: found[name] for name in self._names}

    def restore(self, group: OptimizerGroup, who: str) -> None:
        """Let the optimizer go on from a state; a state without moments begins them at 0.

        Raises ValueError, with nothing changed, if the state has moments of other parameters or another optimizer.
        """
        assert self.optimizer is not None
        moments = self.moments()
        _check_moments(who, group, moments)
        _restore(self.optimizer, group, moments)

    # --- checkpoints ---

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


def _by_one_name(moments: Mapping[str, Arrays]) -> dict[str, np.ndarray]:
    """The moments of all parameters under one name each."""
    return {f"{name}/{moment}": array for name, each in moments.items() for moment, array in each.items()}


def _check_moments(who: str, group: OptimizerGroup, moments: Mapping[str, Arrays]) -> None:
    """Raise ValueError unless a state has moments like these, or none, and a number of steps."""
    if group.step < 0:
        raise ValueError(f"{who}: the checkpoint has {group.step} steps of the optimizer, expected at least 0")
    saved = _by_one_name(group.moments)
    try:
        check_like(who, "moments", saved, _by_one_name(moments) if saved else {})
    except ValueError as error:
        raise ValueError(f"{error}: it was saved with another optimizer or model") from None


def _restore(optimizer: SGD | AdamW, group: OptimizerGroup, moments: Mapping[str, Arrays]) -> None:
    for name, each in moments.items():
        for moment, array in each.items():
            array[...] = group.moments.get(name, {}).get(moment, 0)
    optimizer.steps = group.step


def check_like(who: str, what: str, found: Arrays, expected: Arrays) -> None:
    """Raise ValueError unless a checkpoint's arrays have the expected names, dtypes and shapes."""
    if found.keys() != expected.keys():
        names, others = (", ".join(sorted(each)) or "none" for each in (found, expected))
        raise ValueError(f"{who}: the checkpoint has the {what} {names}, expected {others}")
    for name, array in found.items():
        other = expected[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            raise ValueError(
                f"{who}: the checkpoint's {name!r} is {array.dtype} of shape {array.shape}, "
                f"expected {other.dtype} of shape {other.shape}"
            )

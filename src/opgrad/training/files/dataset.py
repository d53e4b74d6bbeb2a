"""Data for training: named arrays, one row per example, that fit the inputs of a graph."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from opgrad.training.files import data as files
from opgrad.training.files.batches import TensorSpec

# The memory of an input, by its place among all and its shape; and what writes the examples of these numbers there.
Buffer: TypeAlias = Callable[[int, tuple[int, ...]], np.ndarray]
Fill: TypeAlias = Callable[[np.ndarray, Buffer], None]

DIGITS = Path(__file__).with_name("digits.npz")


@dataclass(frozen=True)
class Dataset:
    """Arrays named like a graph's inputs, all with the same number of rows, which are the examples.

    axes: for each array whose rows do not lie along the first axis, the axis of its rows; None for an array that is the
    same for all examples. An array with k times as many rows as the first one has k consecutive rows for each example.
    """

    arrays: Mapping[str, np.ndarray]
    axes: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of examples."""
        places = ((array, self.axes.get(name, 0)) for name, array in self.arrays.items())
        return next(int(array.shape[axis]) for array, axis in places if axis is not None)

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The weight of some examples, or of all, in the mean of a loss: their number."""
        return float(self.rows if rows is None else len(rows))

    def order(self, generator: np.random.Generator) -> np.ndarray:
        """The numbers of all examples, in the order of an epoch, int64 [n]."""
        return generator.permutation(self.rows)

    def filler(self, inputs: Sequence[TensorSpec]) -> Fill:
        """What copies examples into the memory of a graph's inputs."""
        data = Dataset(self.arrays, {spec.name: spec.axis for spec in inputs})
        parts = [data.part(spec.name) for spec in inputs]

        def fill(rows: np.ndarray, buffer: Buffer) -> None:
            for place, part in enumerate(parts):
                part.copy(rows, buffer(place, part.shape(len(rows))))

        return fill

    def take(self, rows: np.ndarray) -> "Dataset":
        """The examples with these numbers, int64 [n]."""
        return Dataset({name: self.part(name).of(rows) for name in self.arrays}, self.axes)

    def part(self, name: str) -> "ArrayPart":
        """An array, from which examples are taken."""
        array, axis = self.arrays[name], self.axes.get(name, 0)
        if axis is None:
            return ArrayPart(array, None, 1)
        return ArrayPart(array, axis, array.shape[axis] // max(self.rows, 1) or 1)

    def whole(self, batch_rows: int | None) -> "Dataset":
        """The first examples, as many as fill whole batches of `batch_rows` rows; all of them for None."""
        if batch_rows is None or not self.rows % batch_rows:
            return self
        if self.rows < batch_rows:
            raise ValueError(f"Dataset.whole: there are {self.rows} rows, expected at least one batch of {batch_rows}")
        return self.take(np.arange(self.rows - self.rows % batch_rows))

    def split(self, test_rows: int, seed: int) -> tuple["Dataset", "Dataset"]:
        """Part into training and test examples.

        test_rows: how many of them are for the test; the rest is for training.
        seed: rows are shuffled by `default_rng(seed).permutation`; the last ones are for the test.
        Raises ValueError if either part would be empty.
        """
        if self.rows < 2:
            raise ValueError(f"Dataset.split: rows is {self.rows}, expected at least 2, of which one is for the test")
        if not 0 < test_rows < self.rows:
            raise ValueError(f"Dataset.split: test_rows is {test_rows}, expected 1 to {self.rows - 1}")
        order = np.random.default_rng(seed).permutation(self.rows)
        return self.take(order[:-test_rows]), self.take(order[-test_rows:])


class Examples(Protocol):
    """Examples that are trained on or evaluated: a `Dataset`, or others that make their arrays when they are needed."""

    @property
    def rows(self) -> int:
        """The number of examples."""

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The weight of some examples, or of all, in the mean of a loss."""

    def order(self, generator: np.random.Generator) -> np.ndarray:
        """The numbers of all examples, in the order of an epoch, int64 [n]."""

    def filler(self, inputs: Sequence[TensorSpec]) -> Fill:
        """What copies examples into the memory of a graph's inputs."""

    def take(self, rows: np.ndarray) -> Dataset:
        """The examples with these numbers, int64 [n]."""


def batches(data: Examples, rows: int) -> Iterator[tuple[int, Dataset]]:
    """The examples, so many at a time, each time with the number of the first; the last time what is left."""
    for start in range(0, data.rows, rows):
        yield start, data.take(np.arange(start, min(start + rows, data.rows)))


@dataclass(frozen=True)
class ArrayPart:
    """An array with the same number of consecutive rows for each example along an axis; without axis, one for all."""

    array: np.ndarray
    axis: int | None
    times: int

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of the array for so many examples."""
        shape = self.array.shape
        if self.axis is None:
            return shape
        return (*shape[: self.axis], rows * self.times, *shape[self.axis + 1 :])

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The examples with these numbers. Raises IndexError."""
        if self.axis is None:
            return self.array
        if self.times == 1:
            return self.array.take(rows, axis=self.axis)
        return self._by_example(self.array).take(rows, axis=self.axis).reshape(self.shape(len(rows)))

    def copy(self, rows: np.ndarray, to: np.ndarray) -> None:
        """Copy the examples with these numbers, which are not checked."""
        if self.axis is None:
            np.copyto(to, self.array)
        elif self.times == 1:
            self.array.take(rows, axis=self.axis, out=to, mode="clip")
        else:
            self._by_example(self.array).take(rows, axis=self.axis, out=self._by_example(to), mode="clip")

    def _by_example(self, array: np.ndarray) -> np.ndarray:
        """A view of an array with an axis of its own for the rows of an example."""
        axis = self.axis or 0
        before, rows, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
        return array.reshape(*before, rows // self.times, self.times, *after)


def load_named(name: str, inputs: Sequence[TensorSpec], divide: Mapping[str, float] | None = None) -> Dataset:
    """A dataset that comes with opgrad: "digits", 1,797 scanned digits.

    inputs: the graph's inputs, one for the 64 pixels (0 to 16) and one for the digit.
    divide: see `load_file`.
    Raises ValueError for another name, and what `load_file` raises where the data do not fit.

    Source: the test set of Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak 1998, UCI Machine
    Learning Repository, CC BY 4.0; in the order of scikit-learn's `load_digits`.
    """
    if name != "digits":
        raise ValueError(f"load_named: the dataset is {name!r}, expected 'digits'")
    held = files.read_npz(DIGITS, ("pixels", "digits"))
    return _dataset(_pair(held["pixels"], held["digits"], inputs, name), inputs, divide or {}, name)


def load_file(
    path: str | PathLike[str], inputs: Sequence[TensorSpec], divide: Mapping[str, float] | None = None
) -> Dataset:
    """Read the data for a graph's inputs from a file.

    path: `.npz` with arrays named like the inputs, or `x` and `y` where there is one input beside the label;
        `.npy` or `.csv` with a table of numbers: the last column is the label, the others are the input's
        values in C order. A `.csv` is separated by commas, semicolons or tabs; its first line may hold names.
    inputs: the graph's inputs, the label last. Each array has their shape, with any number of rows.
    divide: by input, a number that its values are divided by.
    Float inputs take any numbers, integer ones whole numbers that their dtype holds.
    Raises OSError if the file cannot be read, ValueError or TypeError if its content does not fit.
    """
    path = Path(path)
    if path.suffix == ".npz":
        arrays = _read_npz(path, inputs)
    elif path.suffix in (".npy", ".csv"):
        table = files.read_npy(path) if path.suffix == ".npy" else files.read_csv(path)
        if table.ndim != 2 or table.shape[1] < 2:
            raise ValueError(f"{path}: it has shape {table.shape}, expected rows of values and a label")
        arrays = _pair(table[:, :-1], table[:, -1], inputs, str(path))
    else:
        raise ValueError(f"{path}: the file's type is {path.suffix!r}, expected .npz, .npy or .csv")
    return _dataset(arrays, inputs, divide or {}, str(path))


def load_inputs(
    source: str | PathLike[str], inputs: Sequence[TensorSpec], divide: Mapping[str, float] | None = None
) -> Dataset:
    """The data for a model's inputs alone, of what may hold labels, too.

    source: a file as of `load_file`, or the name of a dataset as of `load_named`. inputs: without a label.
    Raises what these raise.
    """
    path = Path(source)
    if path.suffix != ".npz":
        both, load = (
            [*inputs, TensorSpec("a label", np.dtype(np.float64), ("rows",))],
            load_file if path.suffix else load_named,
        )
        whole = load(str(source), both, divide)
        return Dataset({spec.name: whole.arrays[spec.name] for spec in inputs}, whole.axes)
    if len(inputs) == 1 and {"x"} == {"x", inputs[0].name}.intersection(files.array_names(path)):
        return _dataset({inputs[0].name: files.read_npz(path, ("x",))["x"]}, inputs, divide or {}, str(path))
    return _dataset(_read_npz(path, inputs), inputs, divide or {}, str(path))


def _read_npz(path: Path, inputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    held = files.array_names(path)
    if len(inputs) == 2 and {"x", "y"}.issubset(held):
        arrays = files.read_npz(path, ("x", "y"))
        return {inputs[0].name: arrays["x"], inputs[1].name: arrays["y"]}
    missing = [spec.name for spec in inputs if spec.name not in held]
    if missing:
        found = ", ".join(held) or "no arrays"
        raise ValueError(f"{path}: it holds {found}, expected an array for the input {missing[0]!r}")
    return files.read_npz(path, [spec.name for spec in inputs])


def _pair(x: np.ndarray, y: np.ndarray, inputs: Sequence[TensorSpec], origin: str) -> dict[str, np.ndarray]:
    """Rows of values and one label each, in the shapes of a graph's two inputs."""
    if len(inputs) != 2 or any(spec.axis != 0 for spec in inputs):
        names = ", ".join(spec.name for spec in inputs)
        raise ValueError(f"{origin}: it has values and labels, expected arrays for {names}: use an .npz file")
    sizes = inputs[0].shape[1:]
    known = all(isinstance(size, int) for size in sizes)
    if known and math.prod(map(int, sizes)) == x.shape[1]:
        x = x.reshape(len(x), *map(int, sizes))
    return {inputs[0].name: x, inputs[1].name: y}


def _dataset(
    arrays: Mapping[str, np.ndarray], inputs: Sequence[TensorSpec], divide: Mapping[str, float], origin: str
) -> Dataset:
    unknown = divide.keys() - {spec.name for spec in inputs}
    if unknown:
        raise ValueError(f"{origin}: divide names {min(unknown)!r}, expected an input of the graph")
    fitting = {spec.name: _fit(arrays[spec.name], spec, divide.get(spec.name, 1.0), origin) for spec in inputs}
    result = Dataset(fitting, {spec.name: spec.axis for spec in inputs if spec.axis != 0})
    own = [spec for spec in inputs if spec.axis is not None]
    for spec in own:
        _check_rows(result, spec, own[0], origin)
    if not result.rows:
        raise ValueError(f"{origin}: it has no rows, expected at least one")
    return result


def _check_rows(data: Dataset, spec: TensorSpec, first: TensorSpec, origin: str) -> None:
    """Raise ValueError unless an array has as many rows as the first, or several for each of them."""
    rows = data.arrays[spec.name].shape[spec.axis or 0]
    if rows == data.rows:
        return
    if spec.rows == first.rows or not data.rows or rows % data.rows or not rows:
        raise ValueError(f"{origin}: {spec.name} has {rows} rows, expected {data.rows}")
    if axes := {name: axis for name, axis in data.axes.items() if axis is not None}:
        place = f"along axis {max(axes.values())} of {max(axes, key=lambda name: axes[name])}"
        raise NotImplementedError(
            f"{origin}: {spec.name} has {rows} rows and the examples lie {place}, expected {data.rows}"
        )


def _fit(array: np.ndarray, spec: TensorSpec, divisor: float, origin: str) -> np.ndarray:
    """The array with the dtype of the graph's input, after checks of shape and values."""
    if not fits(array.shape, spec.shape):
        raise ValueError(f"{origin}: {spec.name} has shape {array.shape}, expected {show(spec.shape)}")
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{origin}: {spec.name} has dtype {array.dtype}, expected numbers")
    _check_finite(array, spec, f"{origin}: {spec.name}", origin)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = array / divisor if divisor != 1 else array
        result = np.asarray(scaled, dtype=spec.dtype, order="C")
    _check_finite(result, spec, f"{origin}: {spec.name}, in {spec.dtype} and divided by {divisor:g},", origin)
    if spec.dtype.kind in "iub" and not np.array_equal(result, scaled):
        raise ValueError(f"{origin}: {spec.name} has values that are no {spec.dtype}, expected whole numbers")
    return result


def _check_finite(array: np.ndarray, spec: TensorSpec, what: str, origin: str) -> None:
    others = tuple(axis for axis in range(array.ndim) if axis != spec.axis)
    bad = np.flatnonzero(~np.isfinite(array).all(axis=others))
    if bad.size:
        raise ValueError(f"{what} has no finite number in {row_of(origin, int(bad[0]))}, expected finite numbers")


def row_of(origin: str | PathLike[str], row: int) -> str:
    """The name of a row in messages: its number from 0, or for a text file the number of its line from 1.

    origin: the file, or the name of a dataset.
    """
    path = Path(origin)
    return f"line {files.line_of(path, row)}" if path.suffix == ".csv" else f"row {row}"


def fits(shape: Sequence[int], expected: Sequence[int | str]) -> bool:
    """Whether an array of this shape fits the shape that a graph declares for an input."""
    return len(shape) == len(expected) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(shape, expected, strict=True)
    )


def show(shape: Sequence[int | str]) -> str:
    """A shape as text; a size that varies is shown by its name."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"

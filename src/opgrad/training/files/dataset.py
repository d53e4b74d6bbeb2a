"""Data for training: named arrays, one row per example, that fit the inputs of a graph.

Arrays of numbers are read from untrusted .npz, .npy and .csv files. Nothing in a file is executed, and memory is
allocated only after the file was found to be as long as its header claims. Every fault raises an exception of one
sentence with the file's name: TypeError for dtypes, otherwise ValueError.
"""

import math
import os
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.lib import format as npy

from opgrad.base.files import open_regular

ROWS = "rows"  # the name for a variable batch size that has none in the graph


@dataclass(frozen=True)
class TensorSpec:
    """A graph's input: its name, dtype and shape; a name in place of a size stands for any size.

    axis: the axis of the examples; None: the input is the same for all examples, such as a recurrence's first state.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]
    axis: int | None = 0

    @property
    def rows(self) -> int | str:
        """The size of the axis of the examples; 1 for an input that is the same for all examples."""
        return 1 if self.axis is None else self.shape[self.axis]


def located(inputs: Sequence[TensorSpec]) -> tuple[tuple[TensorSpec, ...], int | None]:
    """The inputs with their axes of examples, and the number of rows if they only take one number, else None.

    The examples lie along the first axis, unless the sizes of the inputs contradict that, or a name of theirs does.
    A single number, and an input of one row beside data and labels of more, are the same for all examples.
    Raises ValueError without inputs, NotImplementedError where no axis can be that of the examples.
    """
    rows = [spec for spec in inputs if spec.shape and spec.shape[0] != 1]
    firsts = {spec.shape[0] for spec in rows}
    shared = [
        spec
        for spec in inputs
        if not spec.shape
        or (
            spec.shape[0] == 1
            and len(rows) > 1
            and not any(size in firsts or _is_batch(size) for size in spec.shape[1:])
        )
    ]
    own = [spec for spec in inputs if spec not in shared]
    if not own:
        raise ValueError("the training graph has no inputs beside the parameters, expected data")
    common = _common(own)
    own = [replace(spec, axis=spec.shape.index(common) if common in spec.shape else 0) for spec in own]
    fixed = sorted({spec.rows for spec in own if isinstance(spec.rows, int)})
    if not _multiples(fixed) or (len(fixed) > 1 and any(spec.axis for spec in own)):
        raise NotImplementedError(f"the inputs have {fixed} rows, expected one number of them")
    found = {spec.name: replace(spec, axis=None) for spec in shared}
    for spec in own:
        shape, axis = list(spec.shape), spec.axis or 0
        if fixed:  # for any number of rows
            times = spec.rows // fixed[0] if isinstance(spec.rows, int) and spec.rows > fixed[0] else 1
            shape[axis] = ROWS if times == 1 else f"{times}*{ROWS}"
        found[spec.name] = replace(spec, shape=tuple(shape))
    return tuple(found[spec.name] for spec in inputs), fixed[0] if fixed else None


def _multiples(numbers: Sequence[int]) -> bool:
    """Whether all numbers are multiples of the first, as the number of tokens' labels is one of that of examples."""
    return len(numbers) < 2 or (numbers[0] > 0 and all(each % numbers[0] == 0 for each in numbers))


def _common(inputs: Sequence[TensorSpec]) -> int | str | None:
    """The size of the axis of the examples, where that is not the first of every input."""
    # For each size the number of inputs in which it stands exactly once; a size of 1 says nothing.
    counts = Counter(size for spec in inputs for size in set(spec.shape) if spec.shape.count(size) == 1 and size != 1)
    shared = [size for size, count in counts.items() if count > 1 or _is_batch(size)]
    firsts = {spec.shape[0] for spec in inputs}
    elsewhere = any(size in spec.shape[1:] for size in firsts for spec in inputs if size in shared)
    numbers = sorted(each for each in firsts if isinstance(each, int))
    contradicted = len(firsts) > 1 and (elsewhere or not _multiples(numbers))
    named_elsewhere = any(map(_is_batch, shared)) and not any(map(_is_batch, firsts))
    if not contradicted and not named_elsewhere:
        return None
    # Labels for the tokens of all examples have a size that no other input has.
    others = [spec.shape for spec in inputs if len(spec.shape) > 1 or spec.shape[0] in shared]
    everywhere = [size for size in shared if all(size in shape for shape in others)]
    names = [size for size in everywhere if isinstance(size, str)]
    return next(iter([*filter(_is_batch, names), *names, *everywhere]), None)


def _is_batch(size: int | str) -> bool:
    return isinstance(size, str) and ("batch" in size.lower() or size in ("N", "B"))


HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
MOST_EXPANDED = 1100  # the most bytes from one compressed byte; deflate makes at most 1,032
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
DELIMITERS = ";\t,"  # tried in this order, because a comma may be part of a name or a decimal comma


def array_names(path: Path) -> list[str]:
    with _archive(path) as archive:
        return list(_members(archive, path))


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Some of the arrays in an .npz file."""
    with _archive(path) as archive:
        members, found = _members(archive, path), {}
        for name in names:
            info, what = members[name], f"{path}: {name}"
            if info.file_size > MOST_EXPANDED * max(info.compress_size, 1):
                size = f"{info.file_size} bytes in {info.compress_size}"
                raise ValueError(f"{what} claims {size}, more than can be packed there")
            try:
                file = archive.open(info)
            except Exception as error:  # encrypted, packed in an unknown way, or damaged
                raise ValueError(f"{what} cannot be unpacked: {_reason(error)}") from None
            with file:
                found[name] = _read_array(file, info.file_size, what)
        return found


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with open_regular(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except Exception as error:  # zipfile raises many kinds of exceptions for a damaged directory
            raise ValueError(f"{path}: no .npz file, or damaged: {_reason(error)}") from None
        with archive:
            yield archive


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    found = dict[str, zipfile.ZipInfo]()
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in found:
            raise ValueError(f"{path} has two arrays with the name {name!r}")
        if not info.filename.endswith("/"):
            found[name] = info
    return found


def _read_array(file: IO[bytes], size: int, what: str) -> np.ndarray:
    """The array in an open file of so many bytes."""
    try:
        shape, _, dtype = HEADERS[npy.read_magic(file)](file)
    except Exception:  # NumPy parses the header as a Python literal, which fails in many ways if it is damaged
        raise ValueError(f"{what} is no array in NumPy's format, or damaged") from None
    if dtype.kind not in "fiub":
        raise TypeError(f"{what} has dtype {dtype}, expected numbers")
    claimed, left = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or claimed > left:
        raise ValueError(f"{what} is damaged, it claims shape {shape} of {dtype}, and {left} bytes follow")
    file.seek(0)
    try:
        array: np.ndarray = npy.read_array(file, allow_pickle=False)
    except Exception as error:
        raise ValueError(f"{what} is damaged: {_reason(error)}") from None
    return array


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_csv(path: Path) -> np.ndarray:
    """The numbers in a .csv file, in rows.

    It is in UTF-8, or in UTF-16 with a byte-order mark; values are separated by commas, semicolons or tabs. The first
    line may hold names. Empty lines and those that begin with # are skipped.
    """
    encoding = _encoding(path)
    try:
        skipped, delimiter = _start(path, encoding)
        return np.loadtxt(
            path, delimiter=delimiter, ndmin=2, skiprows=skipped, encoding=encoding, comments="#", quotechar='"'
        )
    except UnicodeError:
        raise ValueError(f"{path}: it is no text in UTF-8, nor in UTF-16 with a byte-order mark") from None
    except ValueError as error:
        raise ValueError(f"{path}: no table of numbers: {_reason(error)}") from None


def line_of(path: Path, row: int) -> int:
    """The number of the line, from 1, that holds a row of the result of `read_csv`."""
    encoding = _encoding(path)
    skipped, _ = _start(path, encoding)
    with path.open(encoding=encoding) as file:
        lines = (number for number, line in enumerate(file, 1) if number > skipped and line.partition("#")[0].strip())
        return next(islice(lines, row, None))


def _encoding(path: Path) -> str:
    with open_regular(path) as file:
        return "utf-16" if file.read(2) in UTF_16 else "utf-8-sig"


def _start(path: Path, encoding: str) -> tuple[int, str]:
    """The number of lines before the numbers, and the delimiter of the numbers."""
    with path.open(encoding=encoding) as file:
        lines = ((number, line) for number, line in enumerate(file) if line.strip() and line.lstrip()[0] != "#")
        for index, (number, line) in enumerate(lines):
            if "\0" in line:
                raise UnicodeError
            cells = [cell.strip().strip('"') for cell in line.split(_delimiter(line))]
            names = [cell for cell in cells if not _is_number(cell)]
            if not names:
                return number, _delimiter(line)
            if index or len(names) < len(cells):
                raise ValueError(f"line {number + 1} has {names[0]!r}, expected numbers, or names alone in the first")
    raise ValueError("it has no rows")


def _delimiter(line: str) -> str:
    return next((mark for mark in DELIMITERS if mark in line), ",")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


DIGITS = Path(__file__).with_name("digits.npz")


class Examples:
    """Examples that are trained on or evaluated: a `Dataset`, or others that make their arrays when they are needed."""

    @property
    def rows(self) -> int:
        """The number of examples."""
        raise NotImplementedError

    def weight(self, rows: np.ndarray | None = None) -> float:
        """The weight of some examples, or of all, in the mean of a loss: their number."""
        return float(self.rows if rows is None else len(rows))

    def order(self, generator: np.random.Generator) -> np.ndarray:
        """The numbers of all examples, in the order of an epoch, int64 [n]."""
        return generator.permutation(self.rows)

    def take(self, rows: np.ndarray) -> "Dataset":
        """The arrays of the examples with these numbers, int64 [n]."""
        raise NotImplementedError

    def _some(self, rows: np.ndarray) -> Self:
        """The same with these examples alone."""
        raise NotImplementedError

    def split(self, test_rows: int, seed: int) -> tuple[Self, Self]:
        """Part into training and test examples.

        test_rows: how many of them are for the test; the rest is for training.
        seed: rows are shuffled by `default_rng(seed).permutation`; the last ones are for the test.
        Raises ValueError if either part would be empty.
        """
        what = f"{type(self).__name__}.split"
        if self.rows < 2:
            raise ValueError(f"{what}: rows is {self.rows}, expected at least 2, of which one is for the test")
        if not 0 < test_rows < self.rows:
            raise ValueError(f"{what}: test_rows is {test_rows}, expected 1 to {self.rows - 1}")
        order = np.random.default_rng(seed).permutation(self.rows)
        return self._some(order[:-test_rows]), self._some(order[-test_rows:])


@dataclass(frozen=True)
class Dataset(Examples):
    """Arrays named like a graph's inputs, all with the same number of rows, which are the examples.

    axes: for each array whose rows do not lie along the first axis, the axis of its rows; None for an array that is the
    same for all examples. An array with k times as many rows as the first one has k consecutive rows for each example.
    """

    arrays: Mapping[str, np.ndarray]
    axes: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of examples."""
        for name, array in self.arrays.items():
            if (axis := self.axes.get(name, 0)) is not None:
                return int(array.shape[axis])
        raise ValueError("all arrays are the same for all examples, expected one with rows")

    def take(self, rows: np.ndarray) -> "Dataset":
        """The examples with these numbers, int64 [n]. Raises IndexError."""
        count, found = max(self.rows, 1), dict[str, np.ndarray]()
        for name, array in self.arrays.items():
            axis = self.axes.get(name, 0)
            if axis is None:
                found[name] = array
                continue
            times = array.shape[axis] // count or 1
            if times == 1:
                found[name] = array.take(rows, axis=axis)
                continue
            before, size, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
            by_example = array.reshape(*before, size // times, times, *after)
            found[name] = by_example.take(rows, axis=axis).reshape(*before, len(rows) * times, *after)
        return Dataset(found, self.axes)

    def _some(self, rows: np.ndarray) -> Self:
        return replace(self, arrays=self.take(rows).arrays)

    def whole(self, batch_rows: int | None) -> "Dataset":
        """The first examples, as many as fill whole batches of `batch_rows` rows; all of them for None."""
        if batch_rows is None or not self.rows % batch_rows:
            return self
        if self.rows < batch_rows:
            raise ValueError(f"Dataset.whole: there are {self.rows} rows, expected at least one batch of {batch_rows}")
        return self.take(np.arange(self.rows - self.rows % batch_rows))


def batches(data: Examples, rows: int) -> Iterator[tuple[int, Dataset]]:
    """The examples, so many at a time, each time with the number of the first; the last time what is left."""
    for start in range(0, data.rows, rows):
        yield start, data.take(np.arange(start, min(start + rows, data.rows)))


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
    held = read_npz(DIGITS, ("pixels", "digits"))
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
        if path.suffix == ".npy":
            with open_regular(path) as file:
                table = _read_array(file, os.fstat(file.fileno()).st_size, str(path))
        else:
            table = read_csv(path)
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

    source: a file for `load_file`, or a name for `load_named`, which raise the errors. inputs: without a label.
    """
    path = Path(source)
    if path.suffix != ".npz":
        both = [*inputs, TensorSpec("a label", np.dtype(np.float64), ("rows",))]
        whole = (load_file if path.suffix else load_named)(str(source), both, divide)
        return Dataset({spec.name: whole.arrays[spec.name] for spec in inputs}, whole.axes)
    if len(inputs) == 1 and {"x"} == {"x", inputs[0].name}.intersection(array_names(path)):
        return _dataset({inputs[0].name: read_npz(path, ("x",))["x"]}, inputs, divide or {}, str(path))
    return _dataset(_read_npz(path, inputs), inputs, divide or {}, str(path))


def _read_npz(path: Path, inputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    held = array_names(path)
    if len(inputs) == 2 and {"x", "y"}.issubset(held):
        arrays = read_npz(path, ("x", "y"))
        return {inputs[0].name: arrays["x"], inputs[1].name: arrays["y"]}
    missing = [spec.name for spec in inputs if spec.name not in held]
    if missing:
        found = ", ".join(held) or "no arrays"
        raise ValueError(f"{path}: it holds {found}, expected an array for the input {missing[0]!r}")
    return read_npz(path, [spec.name for spec in inputs])


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
        rows = result.arrays[spec.name].shape[spec.axis or 0]
        if rows == result.rows:
            continue
        if spec.rows == own[0].rows or not result.rows or rows % result.rows or not rows:
            raise ValueError(f"{origin}: {spec.name} has {rows} rows, expected {result.rows}")
        if axes := {name: axis for name, axis in result.axes.items() if axis is not None}:
            place = f"along axis {max(axes.values())} of {max(axes, key=lambda name: axes[name])}"
            raise NotImplementedError(
                f"{origin}: {spec.name} has {rows} rows and the examples lie {place}, expected {result.rows}"
            )
    if not result.rows:
        raise ValueError(f"{origin}: it has no rows, expected at least one")
    return result


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
    return f"line {line_of(path, row)}" if path.suffix == ".csv" else f"row {row}"


@lru_cache(1 << 10)  # steps of small models ask in every batch
def fits(shape: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    """Whether an array of this shape fits the shape that a graph declares for an input."""
    return len(shape) == len(expected) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(shape, expected, strict=True)
    )


def show(shape: Sequence[int | str]) -> str:
    """A shape as text; a size that varies is shown by its name."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"

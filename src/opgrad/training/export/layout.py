"""The state of an exported step, which each call updates, and its layout in memory.

The state lies in one order, in a weights file as in flat inputs: first the trainable parameters, then the running
statistics, then each moment of all trainable parameters.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.base.files import copied_file, sha256_of
from opgrad.training.files import weights
from opgrad.training.files.checkpoint_tables import raw
from opgrad.training.files.tensor_values import HUGE, ValuesFile, is_placeholder, placeholder, refer, tensor_of


class Constants:
    """Values that become initializers of exported models.

    arrays: the values by name. files: for those that lie in a file, the file, the first byte and the number of bytes.
    """

    def __init__(self, arrays: dict[str, np.ndarray], files: Mapping[str, tuple[Path, int, int]]):
        self.arrays, self._files = arrays, files
        self._parts: dict[str, tuple[str, int, int]] = {}

    def tensor(self, name: str) -> TensorProto:
        """The initializer of this name; a placeholder if it is huge."""
        array = self.arrays[name]
        return placeholder(name, array) if array.nbytes > HUGE else tensor_of(name, array)

    def part(
        self, name: str, source: str, element_type: int, sizes: Sequence[int], first: int, last: int
    ) -> TensorProto:
        """An initializer of another type and shape whose values are a constant's bytes from `first` to before `last`.

        A huge constant and its parts lie at one place of a file.
        """
        array, tensor = self.arrays[source], TensorProto(name=name, data_type=element_type, dims=sizes)
        if array.nbytes > HUGE:
            self._parts[name] = source, first, last - first
            return placeholder(name, tensor)
        tensor.raw_data = raw(array).tobytes()[first:last]
        return tensor

    def write(self, models: Sequence[onnx.ModelProto], folder: Path, output: Path) -> list[Path]:
        """Replace the placeholders of models by references to files; returns these, in their order.

        folder: where new files are written, one of `staged`. output: the file of the step, beside which all files will
        be. Raises ValueError if another file has the name of one that is copied there.
        """
        used: dict[str, Path] = {}
        tensors = [each for model in models for each in model.graph.initializer if is_placeholder(each)]
        sources = {name: (name, 0, self.arrays[name].nbytes) for each in tensors if (name := each.name) in self.arrays}
        sources |= {each.name: self._parts[each.name] for each in tensors if each.name in self._parts}
        own = folder / f"{output.stem}.data"
        if unwritten := [each for each, _, _ in sources.values() if each not in self._files]:
            used[own.name] = own
            with ValuesFile(own) as values:
                places = {each: values.place(self.arrays[each]) for each in unwritten}
        for tensor in tensors:
            source, first, count = sources[tensor.name]
            if source in self._files:
                path, start, _ = self._files[source]
                used[path.name] = path
            else:
                path, start = own, places[source]["offset"]
            refer(tensor, path.name, start + first, count)
        return [_beside(path, folder, output) for path in used.values()]


def _beside(path: Path, folder: Path, output: Path) -> Path:
    """The file that will be beside the step: itself if it lies there, else a copy."""
    target = output.parent / path.name
    if path.parent == folder or (target.exists() and target.samefile(path)):
        return path
    if target.exists() and sha256_of([target]) != sha256_of([path]):
        raise ValueError(f"{target} is another file than {path}, of which it would be a copy: choose a new folder")
    copied_file(folder / path.name, path)
    return folder / path.name


PARAMETERS, STATISTICS, MOMENTS, GRADIENTS = "parameters", "statistics", "moments", "gradients"


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state. moment: the name of a parameter's moment; empty for the parameter itself."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: str
    moment: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in a weights file."""
        return f"{self.moment}/{self.name}" if self.moment else self.name


@dataclass(frozen=True)
class Carried:
    """An input of the step and the output that takes its place in the next call.

    kind: parameters, statistics, moments or gradients. tensors: those that it holds, in order.
    """

    kind: str
    input: str
    output: str
    tensors: tuple[StateTensor, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tensors[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    @property
    def element_type(self) -> int:
        return helper.np_dtype_to_tensor_dtype(self.dtype)

    def value(self) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(self.input, self.element_type, self.shape)


@dataclass(frozen=True)
class StateLayout:
    """The layout of a step's state.

    tensors: all of the state except sums of gradients, in the order of a weights file. parts: the inputs, in order.
    flat: whether there is an input for each kind of tensors instead of one for each tensor.
    """

    tensors: tuple[StateTensor, ...]
    parts: tuple[Carried, ...]
    flat: bool

    @property
    def accumulates(self) -> bool:
        return any(each.kind == GRADIENTS for each in self.parts)

    @property
    def trainable(self) -> list[StateTensor]:
        return [each for each in self.tensors if each.kind == PARAMETERS]

    @property
    def statistics(self) -> list[StateTensor]:
        return [each for each in self.tensors if each.kind == STATISTICS]

    @property
    def weights(self) -> list[StateTensor]:
        """The tensors that the eval graph needs: parameters and statistics."""
        return [*self.trainable, *self.statistics]

    def moments(self, group: Sequence[StateTensor]) -> list[list[StateTensor]]:
        """The moments of parameters, kind by kind."""
        names = {each.name for each in group}
        found: dict[str, list[StateTensor]] = {}
        for each in self.tensors:
            if each.kind == MOMENTS and each.name in names:
                found.setdefault(each.moment, []).append(each)
        return list(found.values())

    def sums(self, group: Sequence[StateTensor]) -> list[StateTensor]:
        names = {each.name for each in group}
        return [each for part in self.parts for each in part.tensors if each.kind == GRADIENTS and each.name in names]

    def header(self) -> dict[str, dict[str, Any]]:
        """The header of a weights file with all tensors."""
        return weights.entries({each.key: (each.dtype, each.shape) for each in self.tensors})


def layout_of(
    trainable: Mapping[str, np.ndarray], statistics: Mapping[str, np.ndarray], moments: Sequence[str],
    dtype: np.dtype[Any], flat: bool, accumulate: bool,
) -> StateLayout:  # fmt: skip
    """The layout for these parameters and statistics.

    trainable, statistics: the values by name. moments: their names. dtype: that of parameters and statistics; moments
    and gradients are float32. accumulate: whether sums of gradients are kept.
    """
    single = np.dtype(np.float32)
    weights = [StateTensor(name, array.shape, dtype, PARAMETERS) for name, array in trainable.items()]
    weights += [StateTensor(name, array.shape, dtype, STATISTICS) for name, array in statistics.items()]
    kept = [
        StateTensor(name, array.shape, single, MOMENTS, moment)
        for moment in moments
        for name, array in trainable.items()
    ]
    sums = (
        [StateTensor(name, array.shape, single, GRADIENTS) for name, array in trainable.items()] if accumulate else []
    )
    groups = [weights, kept, sums]
    named: list[tuple[str, list[StateTensor], tuple[int, ...]]]
    if flat:  # one array for each group, under the name of its kind
        named = [(group[0].kind, group, (sum(each.size for each in group),)) for group in groups if group]
    else:
        key = {PARAMETERS: "{0.name}", STATISTICS: "{0.name}", MOMENTS: "{0.key}", GRADIENTS: "gradients/{0.name}"}
        named = [(key[each.kind].format(each), [each], each.shape) for group in groups for each in group]
    parts = (Carried(of[0].kind, name, f"{name}.next", tuple(of), shape) for name, of, shape in named)
    return StateLayout((*weights, *kept), tuple(parts), flat)

"""Large constants of exported models: they stay in the files where they lie, or get one file that all models share."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.base.reading import sha256_of
from opgrad.base.writing import copied_file
from opgrad.training.export.plain import WHO
from opgrad.training.files.checkpoint_tables import raw
from opgrad.training.files.tensor_values import HUGE, ValuesFile, is_placeholder, placeholder, tensor_of


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
        sources = {each.name: self._parts.get(each.name, (each.name, 0, self._count(each))) for each in tensors}
        own = folder / f"{output.stem}.data"
        if any(source not in self._files for source, _, _ in sources.values()):
            used[own.name] = own
            with ValuesFile(own) as values:
                places = {each: values.place(self.arrays[each]) for each, _, _ in sources.values()
                          if each not in self._files}  # fmt: skip
        for tensor in tensors:
            source, first, count = sources[tensor.name]
            if source in self._files:
                path, start, _ = self._files[source]
                used[path.name] = path
                _refer(tensor, path.name, start + first, count)
            else:
                _refer(tensor, own.name, int(places[source]["offset"]) + first, count)
        return [_beside(path, folder, output) for path in used.values()]

    def _count(self, tensor: TensorProto) -> int:
        return 0 if tensor.name in self._parts else self.arrays[tensor.name].nbytes


def _refer(tensor: TensorProto, name: str, offset: int, count: int) -> None:
    """Let a tensor's values be bytes of a file."""
    del tensor.external_data[:]
    for key, value in (("location", name), ("offset", offset), ("length", count)):
        tensor.external_data.add(key=key, value=str(value))


def _beside(path: Path, folder: Path, output: Path) -> Path:
    """The file that will be beside the step: itself if it lies there, else a copy."""
    target = output.parent / path.name
    if path.parent == folder or (target.exists() and target.samefile(path)):
        return path
    if target.exists() and sha256_of([target]) != sha256_of([path]):
        raise ValueError(
            f"{WHO}: {target} is another file than {path}, of which it would be a copy: choose a new folder"
        )
    copied_file(folder / path.name, path)
    return folder / path.name

"""Named arrays in one contiguous array."""

from collections.abc import Iterator, Mapping

import numpy as np

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

"""Constants that look like weights but were never trained: sinusoidal positions, and the normalization of inputs."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.messages import FLOATS, domain_of
from opgrad.onnx.graph.nodes import all_nodes, captured, reads_values

ARITHMETIC = ("Add", "Sub", "Mul", "Div")
PRODUCTS = ("MatMul", "Mul", "Einsum", "Gemm")
WAVES = ("Sin", "Cos")
MOST_STEPS = 8  # the most nodes between a product and the sine of it

POSITIONS, FREQUENCIES, INPUT = "positions, as sines", "frequencies of positions", "normalizes an input"

MOST_LOOKED_AT, MOST_ROWS = 64, 4096  # the most rows or columns of a table to check, and rows of these columns
LEAST_ROWS = 8  # the fewest rows of a table of positions; fewer rows can look like one by chance
# The largest error of a sine in a table of this type; the error of float32 sines of large angles reaches 1e-4.
TOLERANCE = {np.dtype(np.float64): 1e-3, np.dtype(np.float32): 1e-3}
LOW_PRECISION = 2e-2


class Fixed:
    """Finds out which tensors of a graph were never trained.

    graph: with functions inlined. tensors: those that could be weights. values: returns the values of one of them.
    """

    def __init__(self, graph: onnx.GraphProto, tensors: Mapping[str, TensorProto], values: Callable[[str], np.ndarray]):
        self._tensors, self._values = tensors, values
        self._inputs = {each.name: each.type.tensor_type.elem_type for each in graph.input}
        self._producers = {name: node for node in all_nodes(graph.node) for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in filter(reads_values, all_nodes(graph.node)):
            for name in dict.fromkeys(node.input):
                self._readers.setdefault(name, []).append(node)

    def reason(self, name: str) -> str | None:
        """What an untrained tensor is, in words; None for a weight."""
        if self._is_of_frequencies(name):
            return FREQUENCIES
        if self._normalizes_input(name):
            return INPUT
        return POSITIONS if is_of_sines(self._values, name, self._tensors[name].dims) else None

    # --- how inputs are normalized ---

    def _normalizes_input(self, name: str) -> bool:
        """Whether all readers of the tensor apply it to an input, with a number for each channel or feature.

        A tensor with more than one axis larger than 1, such as a table of positions, is no such normalization.
        """
        readers = self._read_through(name) if sum(size > 1 for size in self._tensors[name].dims) <= 1 else []
        return bool(readers) and all(
            node.op_type in ARITHMETIC
            and not domain_of(node)
            and any(self._is_input(other) for other in node.input if other not in values)
            for node, values in readers
        )

    def _read_through(self, name: str) -> list[tuple[onnx.NodeProto, set[str]]]:
        """The nodes that read a tensor, directly or reshaped or cast, each with the names under which it reads it."""
        names, waiting, found = {name}, [name], []
        while waiting:
            for node in self._readers.get(waiting.pop(), ()):
                if facts_of(node).moves:
                    if node.output[0] not in names:
                        names.add(node.output[0])
                        waiting.append(node.output[0])
                else:
                    found.append((node, names))
        return found

    def _is_input(self, name: str) -> bool:
        """Whether a value is a float input, or computed from one and constants element by element."""
        while name not in self._inputs:
            node = self._producers.get(name)
            if node is None or domain_of(node):
                return False
            if facts_of(node).moves:
                name = node.input[0]
                continue
            others = [each for each in node.input if each not in self._tensors]
            if node.op_type not in ARITHMETIC or len(others) != 1:
                return False
            name = others[0]
        return name not in self._tensors

    # --- positions ---

    def _is_of_frequencies(self, name: str) -> bool:
        """Whether a tensor holds frequencies: it is multiplied by positions, and sines are taken of the products."""
        products = [node for node, _ in self._read_through(name)]
        return bool(products) and all(
            node.op_type in PRODUCTS
            and not domain_of(node)
            and self._leads_to_waves(node)
            and self._is_of_integers(node.input, name)
            for node in products
        )

    def _leads_to_waves(self, node: onnx.NodeProto) -> bool:
        names = [*node.output]
        for _ in range(MOST_STEPS):
            readers = [each for name in names for each in self._readers.get(name, ())]
            if any(each.op_type in WAVES for each in readers):
                return True
            names = [
                each.output[0] for each in readers if facts_of(each).moves or each.op_type in (*ARITHMETIC, "Concat")
            ]
        return False

    def _is_of_integers(self, names: Iterable[str], but: str) -> bool:
        """Whether values are computed from integers alone, except for scalar constants."""
        seen, waiting = {but}, [name for name in names if name]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            tensor = self._tensors.get(name)
            if tensor is not None:
                if tensor.data_type in FLOATS and np.prod(tensor.dims) > 1:
                    return False
            elif name in self._inputs:
                if self._inputs[name] in FLOATS:
                    return False
            elif (node := self._producers.get(name)) is not None:
                waiting += captured(node) if reads_values(node) else []
        return True


def is_of_sines(values: Callable[[str], np.ndarray], name: str, dims: Iterable[int]) -> bool:
    """Whether a tensor is a table of sinusoidal positions: sines and cosines, with a row for each position."""
    sizes = [size for size in dims if size != 1]
    if len(sizes) < 2 or max(sizes[-2:]) < LEAST_ROWS or len(sizes) > 3:
        return False
    array = values(name)
    kind = TOLERANCE.get(array.dtype, LOW_PRECISION)
    if not np.all(np.abs(array.ravel()[:: max(1, array.size // 4096)].astype(np.float64)) <= 1 + kind):
        return False
    table = array.reshape(sizes)
    if len(sizes) == 3:  # positions along the two axes of images, or a table for each of several heads
        return _has_pairs(table.reshape(-1, sizes[2]), kind) or _has_pairs(table.reshape(sizes[0], -1).T, kind)
    return any(_has_pairs(each, kind) or _has_waves(each, kind) for each in (table, table.T))


def _some(table: np.ndarray) -> np.ndarray:
    """At most `MOST_LOOKED_AT` rows of a table, evenly spread over it, in float64."""
    step = -(-len(table) // MOST_LOOKED_AT)
    return table[::step].astype(np.float64)


def _has_pairs(table: np.ndarray, tolerance: float) -> bool:
    """Whether every row holds the sines and the cosines of the same angles: the sum of its squares is half its size.

    Rows of zeros, as for a class token or padding, are skipped. Of a large table only some rows are checked.
    """
    table = _some(table)
    rows, columns = table.shape
    squares = np.square(table).sum(axis=1)
    kept = squares > 0
    if columns < 4 or columns % 2 or kept.sum() < max(LEAST_ROWS, rows - 2):
        return False
    close = np.abs(squares[kept] - columns / 2) < tolerance * columns
    return bool(close.all()) and bool(np.ptp(table) > 1)


def _has_waves(table: np.ndarray, tolerance: float) -> bool:
    """Whether every column f is a sine over the rows: f(n + m) + f(n - m) = c * f(n), with one c for all n.

    Of a large table only some columns and the first rows are checked.
    """
    table = _some(table[:MOST_ROWS].T).T
    rows = len(table)
    if rows < LEAST_ROWS or np.ptp(table) <= 1:
        return False
    step = max(1, rows // 4)
    middle, sums = table[step:-step], table[2 * step :] + table[: -2 * step]
    squares = np.square(middle).sum(axis=0)
    factors = np.where(squares > 0, (middle * sums).sum(axis=0) / np.where(squares > 0, squares, 1), 2)
    off = np.abs(sums - factors * middle).max()
    # Columns for which c is always 2 are straight lines.
    return bool(off < 4 * tolerance and (np.abs(factors) <= 2 + tolerance).all() and (factors < 1.9).any())

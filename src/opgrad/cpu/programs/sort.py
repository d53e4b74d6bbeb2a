"""The steps of a counting sort, and the memory that they share."""

from typing import Any, Final

from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.kernels.sort import HOT, scan_counts
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.program import ceil_div

MOST_PARTS: Final = 8  # since each part needs a count for every key
FEWEST_OF_PART: Final = 1 << 14  # positions


class Sorting:
    """Sorts `count` positions by keys from 0 to size - 1, once or several times with the same memory.

    Afterwards `starts` has the place where each key's positions begin, and, behind the last, `count`; `hot` has the
    number of hot keys, and these.
    """

    def __init__(self, steps: ProgramSteps, count: int, size: int):
        self.into, self.count = steps, count
        self.per_part = -(-count // max(1, min(MOST_PARTS, count // max(size, FEWEST_OF_PART))))
        parts, shared = ceil_div(count, self.per_part), steps.workspace.shared
        self.starts, self.hot = shared(size + 1, "int64"), shared(HOT + 2, "int64")
        self.arguments = {"parts": parts, "count": count, "size": size, "starts": self.starts, "hot": self.hot}
        self.arguments["counts"] = shared(parts * size, "int32")

    def add(self, sort: tuple[Kernel, Kernel], source: Any, target: Any) -> None:
        """Add the steps that sort the positions by the keys that `source` gives, and write them to `target`."""
        arguments = {**self.arguments, "source": source, "target": target}
        count_keys, move_positions = sort
        self.into.add_parts(count_keys, self.count, self.per_part, **arguments)
        self.into.add_parts(scan_counts, **arguments)
        self.into.add_parts(move_positions, self.count, self.per_part, **arguments)

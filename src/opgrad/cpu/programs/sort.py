"""The steps of a counting sort, and the memory that they share."""

from typing import Any, Final

from opgrad.cpu.kernels.sort import HOT, CountingSort, scan_counts
from opgrad.cpu.programs import partition
from opgrad.cpu.programs.program import Step
from opgrad.cpu.programs.workspace import Workspace

MOST_PARTS: Final = 8  # since each part needs a count for every key
FEWEST_OF_PART: Final = 1 << 14  # positions


class Sorting:
    """Sorts `count` positions by keys from 0 to size - 1, once or several times with the same memory.

    Afterwards `starts` has the place where each key's positions begin, and, behind the last, `count`; `hot` has the
    number of hot keys, and these.
    """

    def __init__(self, workspace: Workspace, count: int, size: int):
        self.count = count
        self.per_part = -(-count // max(1, min(MOST_PARTS, count // max(size, FEWEST_OF_PART))))
        parts = partition.count(count, self.per_part)
        self.starts, self.hot = workspace.shared(size + 1, "int64"), workspace.shared(HOT + 2, "int64")
        self.arguments = {"parts": parts, "count": count, "size": size, "starts": self.starts, "hot": self.hot}
        self.arguments["counts"] = workspace.shared(parts * size, "int32")

    def steps(self, sort: CountingSort, source: Any, target: Any) -> list[Step]:
        arguments = {**self.arguments, "source": source, "target": target}
        counting, moving = (Step(kernel, self.count, arguments, self.per_part) for kernel in sort)
        return [counting, Step(scan_counts, 1, arguments), moving]

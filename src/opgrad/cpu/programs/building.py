"""What programs of many steps are put together with."""

from collections.abc import Mapping
from typing import Any

from opgrad.contract import DTYPES
from opgrad.contract.problem import Problem
from opgrad.contract.ranges import Explain
from opgrad.cpu.compiler.native import Kernel, vector_lanes
from opgrad.cpu.kernels import gemm
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.partition import round_up
from opgrad.cpu.programs.program import Program, Step, Tables, shared_out
from opgrad.cpu.programs.workspace import Workspace


class ProgramSteps:
    """The steps of a program for a problem, as far as they have been added, their working memory and their tables.

    item, lanes: the bytes of a number that is computed with, and how many a vector has. width: columns of a panel of
    packed rows, as products of matrices take them.
    """

    def __init__(self, problem: Problem):
        self.problem, self.workspace, self.tables = problem, Workspace(precision(problem)), Tables()
        self.item, self.lanes = DTYPES[self.workspace.precision].itemsize, vector_lanes(self.workspace.precision)
        self.width = gemm.VECTORS * self.lanes
        self.steps: list[Step] = []

    def add(self, kernel: Kernel, units: int, unit_bytes: float, arguments: Mapping[str, Any]) -> None:
        """Add a step whose units touch so many bytes each."""
        self.steps.append(shared_out(kernel, units, unit_bytes, arguments))

    def program(self, name: str, explain: Explain | None = None) -> Program:
        return Program(self.steps, self.workspace, explain, name=name, tables=self.tables)

    def given(self, name: str) -> bool:
        """Whether an operand is given or, of a result, wanted."""
        return self.problem.operands.get(name) is not None

    def panels(self, depth: int, columns: int) -> tuple[int, int]:
        """How many panels so many columns of packed rows take, and the numbers of a panel of `depth` rows."""
        return -(-columns // self.width), round_up(depth, self.lanes // 2) * self.width

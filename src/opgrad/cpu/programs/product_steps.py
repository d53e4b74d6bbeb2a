"""Puts the programs of products of matrices together, whose rows are packed in panels."""

from opgrad.contract.signature import Problem
from opgrad.cpu.kernels import gemm
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.runtime.program import round_up


class ProductSteps(ProgramSteps):
    """The steps of a program that multiplies matrices. width: columns of a panel of packed rows."""

    def __init__(self, problem: Problem, computed_in: str = ""):
        super().__init__(problem, computed_in)
        self.width = gemm.VECTORS * self.lanes

    def panels(self, depth: int, columns: int) -> tuple[int, int]:
        """How many panels so many columns of packed rows take, and the numbers of a panel of `depth` rows."""
        return -(-columns // self.width), round_up(depth, self.lanes // 2) * self.width

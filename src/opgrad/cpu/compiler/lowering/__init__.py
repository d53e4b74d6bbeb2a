"""Lowers the operations of `opgrad.cpu.compiler.simd` and `opgrad.cpu.compiler.memory` to LLVM, through Numba.

Imported only when something has to be compiled; nothing else in opgrad imports Numba.
"""

from opgrad.cpu.compiler.lowering import arithmetic, blocks, integers, memory, vectors
from opgrad.cpu.compiler.lowering.build import build
from opgrad.cpu.compiler.lowering.modules import optimised

__all__ = ["arithmetic", "blocks", "build", "integers", "memory", "optimised", "vectors"]

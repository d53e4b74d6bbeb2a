"""What the words of `opgrad.cpu.simd` and `opgrad.cpu.memory` mean to Numba and LLVM.

Imported only when something has to be compiled; nothing else in opgrad imports Numba.
"""

from opgrad.cpu.lowering import arithmetic, blocks, integers, memory, vectors
from opgrad.cpu.lowering.build import build

__all__ = ["arithmetic", "blocks", "build", "integers", "memory", "vectors"]

"""Lowers the operations of `opgrad.cpu.compiler.simd` and `opgrad.cpu.compiler.words` to LLVM, through Numba.

Imported only when something has to be compiled; nothing else in opgrad imports Numba.
"""

from opgrad.cpu.compiler.lowering import arithmetic, vectors, words
from opgrad.cpu.compiler.lowering.build import build, optimised

__all__ = ["arithmetic", "build", "optimised", "vectors", "words"]

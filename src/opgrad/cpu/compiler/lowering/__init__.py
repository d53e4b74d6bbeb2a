"""Lowers the operations of `opgrad.cpu.compiler.simd` and `opgrad.cpu.compiler.words` to LLVM, through Numba.

Imported only when something has to be compiled; nothing else in opgrad imports Numba. Some names that are imported from
Numba are not documented; all releases that the requirements name have them.
"""

import numba

try:
    from opgrad.cpu.compiler.lowering import arithmetic, vectors, words
    from opgrad.cpu.compiler.lowering.build import build, optimised
except ImportError as error:
    raise ImportError(
        f"opgrad: no kernel can be compiled with Numba {numba.__version__}: {error}; install a release of Numba that "
        "opgrad's requirements name"
    ) from error

__all__ = ["arithmetic", "build", "optimised", "vectors", "words"]

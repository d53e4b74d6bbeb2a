"""From what Numba has typed and lowered to one optimised LLVM module.

Numba optimises every function with all that it calls, and makes machine code of it, since it may be called from Python.
Ours are inlined into a kernel, whose module alone is optimised, once: this takes 7.4 s for 16 kernels, that took 18 s.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import llvmlite.binding as llvm
from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from opgrad.cpu.compiler.lowering.pipeline import shortened


class _Library(JITCodeLibrary):
    """Functions as Numba lowers them, neither optimised nor made machine code of; linked where a kernel ends up."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def linked(self) -> Any:
        """A module of these functions and those of all libraries that they call, each of them once."""
        whole, found, waiting = self._final_module.clone(), {self}, list(self._linking_libraries)
        while waiting:
            library = waiting.pop()
            if library not in found:
                found.add(library)
                ours = isinstance(library, _Library)
                whole.link_in(library._final_module if ours else library._get_module_for_linking(), preserve=True)
                waiting += library._linking_libraries if ours else []
        return whole

    def _get_module_for_linking(self) -> Any:
        """What Numba's own functions, which others may use too, are to functions that are not ours."""
        if self._shared_module is None:
            self._shared_module = self.linked()
            for function in self._shared_module.functions:
                if not function.is_declaration and function.linkage == llvm.Linkage.external:
                    function.linkage = llvm.Linkage.linkonce_odr
        return self._shared_module


def _uncallable(library: Any, fndesc: Any, env: Any) -> Any:
    """What Numba keeps as the Python function of a compiled one: ours are called by compiled code alone."""
    return _dynfunc.make_function(fndesc.lookup_module(), fndesc.qualname, "", 0, env, (library,))


def _refresh(context: Any) -> None:
    """Have Numba load what it knows of NumPy, the first time without SciPy's BLAS, which no kernel calls.

    The module `arraymath` imports that BLAS only to learn whether there is one, and OpenBLAS starts threads when it is
    loaded: it takes 0.2 s, and ends the process where the system refuses threads. Where SciPy is installed there
    is one. A program that multiplies matrices with Numba still loads it when that is compiled.
    """
    from numba.np import linalg

    if "numba.np.arraymath" in sys.modules or not hasattr(linalg, "ensure_blas"):
        context.refresh()
        return
    with patch.object(linalg, "ensure_blas", _ensure_scipy):
        context.refresh()
    sys.modules["numba.np.arraymath"].ensure_blas = linalg.ensure_blas


def _ensure_scipy() -> None:
    if find_spec("scipy") is None:
        raise ImportError("there is no SciPy")


@contextmanager
def unoptimised() -> Iterator[None]:
    """Meanwhile Numba, which compiles for one thread at a time, goes no further than LLVM's language."""
    with global_compiler_lock:
        context = cpu_target.target_context
        _refresh(context)  # Numba's own runtime is compiled as ever
        code = context.codegen()
        code._library_class, context.get_executable = _Library, _uncallable
        try:
            with shortened():
                yield
        finally:
            del code._library_class, context.get_executable


def optimised(module: Any, entry: str, machine: Any) -> Any:
    """The module after LLVM's passes of level 3; its function `entry` is the only one that can be called.

    Everything is inlined. Code from the cache finds no Numba and calls nothing else: RuntimeError, where a kernel can
    fail, which it would report.
    """
    module.verify()
    for function in module.functions:
        if not function.is_declaration and function.name != entry:
            function.linkage = llvm.Linkage.internal
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    calls = [each.name for each in module.functions if each.is_declaration and not each.name.startswith("llvm.")]
    if calls:
        raise RuntimeError(f"{module.name} calls {', '.join(calls)}, which code from the cache cannot")
    return module

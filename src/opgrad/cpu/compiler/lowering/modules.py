"""Links the functions that Numba has typed and lowered into one LLVM module, and optimises that.

Numba itself optimises every function together with all functions that it calls, and compiles each to machine code,
because Python may call any of them. Our functions are inlined into a kernel, and nobody else calls them. So only the
kernel's module is optimised, once: 16 kernels take 7.4 s; with Numba's way they took 18 s.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import llvmlite.binding as llvm

from opgrad.cpu.compiler.lowering import numba_private
from opgrad.cpu.compiler.lowering.numba_private import cpu_target, global_compiler_lock
from opgrad.cpu.compiler.lowering.pipeline import shortened


class _Library(numba_private.JITCodeLibrary or object):  # type: ignore[misc]
    """Functions in LLVM's language as Numba lowers them, neither optimised nor compiled, until a kernel links them."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def linked(self) -> Any:
        """A module with these functions and with the functions of all libraries that they call, each library once."""
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
        """The module that is linked into a function compiled by Numba in its usual way.

        Numba keeps its own functions that it compiled for a kernel, and a user's function may call them later. Several
        such modules may hold the same function, so its linkage is linkonce_odr, by which LLVM keeps one copy.
        """
        if self._shared_module is None:
            self._shared_module = self.linked()
            for function in self._shared_module.functions:
                if not function.is_declaration and function.linkage == llvm.Linkage.external:
                    function.linkage = llvm.Linkage.linkonce_odr
        return self._shared_module


def linked(library: Any) -> Any:
    """A module with a library's functions and with all that they call."""
    if isinstance(library, _Library):
        return library.linked()
    library.finalize()  # as Numba does it, which optimises and compiles every function for itself
    return llvm.parse_assembly(library.get_llvm_str())


def _uncallable(library: Any, fndesc: Any, env: Any) -> Any:
    """An object in place of the Python function that Numba makes of a compiled one; only compiled code calls ours."""
    return numba_private.make_function(fndesc.lookup_module(), fndesc.qualname, "", 0, env, (library,))


def _refresh(context: Any) -> None:
    """Have Numba load its knowledge of NumPy; the first time, keep it from loading SciPy's BLAS, which no kernel calls.

    Numba's module `arraymath` loads that BLAS only to learn whether it exists. Loading OpenBLAS starts threads, takes
    0.2 s, and ends the process if the system refuses threads. Here it is enough to see that SciPy is installed, since
    SciPy always brings a BLAS. A program that multiplies matrices with Numba loads it later, when it compiles that.
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
    """Within this context, Numba stops at LLVM's language.

    Its global lock is held: it compiles for one thread at a time.
    """
    with global_compiler_lock:
        context = cpu_target.target_context
        _refresh(context)  # before the patches below: this may compile Numba's own runtime, which must be done in full
        with ExitStack() as patches:
            if numba_private.JITCodeLibrary and numba_private.codegen:
                patches.enter_context(patch.object(context.codegen(), "_library_class", _Library))
            if numba_private.make_function and numba_private.get_executable:
                patches.enter_context(patch.object(context, "get_executable", _uncallable))
            patches.enter_context(shortened())
            yield


def optimised(module: Any, exported: str, machine: Any) -> Any:
    """The module, or that of a text, for a target machine, after LLVM's passes of level 3.

    Its function `exported` is the only exported one. Every other function is inlined. Code from the cache runs in
    processes that have not loaded Numba, so it must not call any function outside the module. Raises RuntimeError if it
    does, for example if a kernel can raise an exception, which it would do by a function of Numba's runtime.
    """
    module = llvm.parse_assembly(module) if isinstance(module, str) else module
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    for function in module.functions:
        if not function.is_declaration and function.name != exported:
            function.linkage = llvm.Linkage.internal
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    calls = [each.name for each in module.functions if each.is_declaration and not each.name.startswith("llvm.")]
    if calls:
        raise RuntimeError(f"{module.name} calls {', '.join(calls)}, which code from the cache cannot")
    return module

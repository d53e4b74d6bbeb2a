"""From what Numba has typed and lowered to one optimised LLVM module.

Numba optimises every function with all that it calls, and makes machine code of it, since it may be called from Python.
Ours are inlined into a kernel, whose module alone is optimised, once: this takes 7.4 s for 16 kernels, that took 18 s.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target


class _Library(JITCodeLibrary):
    """Functions as Numba lowers them, neither optimised nor made machine code of."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_specific(self) -> None:
        pass

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


def _uncallable(library: Any, fndesc: Any, env: Any) -> Any:
    """What Numba keeps as the Python function of a compiled one: ours are called by compiled code alone."""
    return _dynfunc.make_function(fndesc.lookup_module(), fndesc.qualname, "", 0, env, (library,))


@contextmanager
def unoptimised() -> Iterator[None]:
    """Meanwhile Numba, which compiles for one thread at a time, goes no further than LLVM's language."""
    with global_compiler_lock:
        context = cpu_target.target_context
        context.refresh()  # Numba's own runtime is compiled as ever
        code = context.codegen()
        code._library_class, context.get_executable = _Library, _uncallable
        try:
            yield
        finally:
            del code._library_class, context.get_executable


def optimised(text: str, name: str, entry: str, machine: Any) -> Any:
    """The module after LLVM's passes of level 3; its function `name` becomes `entry`, the only one that can be called.

    What Numba makes for C is inlined like everything else, which shows that its reports of errors never run. They call
    Numba, which is not there when code comes from the cache; RuntimeError, where a kernel can fail.
    """
    module = llvm.parse_assembly(re.sub(r"^(attributes #.*)\bnoinline\b", r"\1alwaysinline", text, flags=re.MULTILINE))
    module.get_function(name).name = entry
    for function in module.functions:
        if not function.is_declaration and function.name != entry:
            function.linkage = llvm.Linkage.internal
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    calls = [each.name for each in module.functions if each.is_declaration and not each.name.startswith("llvm.")]
    if calls:
        raise RuntimeError(f"{name} calls {', '.join(calls)}, which code from the cache cannot")
    return module

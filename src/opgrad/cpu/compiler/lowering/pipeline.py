"""Numba's compiler reduced to the passes that a kernel needs, without its events for debuggers and profilers.

With this pipeline, and an exported function that Numba need not compile, 43 kernels take 16 s instead of 26.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from llvmlite import ir as llvm_ir

from opgrad.cpu.compiler.lowering import numba_private as private
from opgrad.cpu.compiler.lowering.numba_private import CompilerBase, DefaultPassBuilder, Inst, PassManager, Var


def _run_pass(manager: Any, index: int, one: Any, state: Any) -> None:
    one.analysis = manager._analysis
    one.run_initialization(state)
    one.run_pass(state)
    one.run_finalizer(state)


class _Passes(PassManager):  # type: ignore[misc]
    """Numba's passes, run without the notes that it takes for each."""

    if private.run_pass and private.has_analysis:
        _runPass = _run_pass


class Pipeline(CompilerBase):  # type: ignore[misc]
    """The compiler for every function of a kernel: Numba's default passes but those that kernels do not need."""

    def define_pipelines(self) -> list[Any]:
        if not PASSES:
            everything = DefaultPassBuilder.define_nopython_pipeline(self.state).passes
            passes = _Passes("kernel")
            passes.passes = private.without_unneeded(everything)
            passes.finalize()
            PASSES.append(passes)
        return PASSES


PASSES: list[Any] = []  # one manager for all functions, since all are compiled with the same options
SIGNATURES: dict[Any, Any] = {}
RESOLVE = getattr(private.BaseFunction, "get_call_type", None)


def _signature(function: Any, context: Any, arguments: Any, keywords: Any) -> Any:
    """The signature of a call with these argument types, kept: Numba finds it by trying all overloads one by one."""
    if keywords:
        return RESOLVE(function, context, arguments, keywords)
    key = id(function), arguments
    if key not in SIGNATURES:
        found = RESOLVE(function, context, arguments, keywords)
        SIGNATURES[key] = function, found, function._impl_keys[found.args]
    _, signature, function._impl_keys[signature.args] = SIGNATURES[key]
    return signature


LIFETIMES = getattr(private.PostProcessor, "run", None)


def _lifetimes(post: Any, emit_dels: bool = False, **options: Any) -> None:
    """Numba's analysis of variables' lifetimes, done only when it is used: before lowering and for generators.

    Lowering needs it to delete each variable after its last use (`emit_dels`). Other passes of Numba ask for it too,
    but those that are left here do not read its result; they only need the control flow in its canonical form.
    """
    if emit_dels or post.func_ir.is_generator:
        LIFETIMES(post, emit_dels, **options)
    else:
        post.func_ir.blocks = private.canonicalize_cfg(post.func_ir.blocks)
        post.func_ir.generator_info = None


VARIABLES = getattr(Inst, "_rec_list_vars", None)
HOLDS_VARIABLES: dict[type, bool] = {}


def _variables(instruction: Any, value: Any) -> list[Any]:
    """The variables in a value of an instruction. Most kinds of values, such as source locations, cannot hold any."""
    kind = type(value)
    if kind is Var:
        return [value]
    holds = HOLDS_VARIABLES.get(kind)
    if holds is None:
        holds = HOLDS_VARIABLES[kind] = issubclass(kind, Var | Inst | list | tuple | dict)
    return VARIABLES(instruction, value) if holds else []


SIZE_OF = getattr(private.BaseContext, "get_abi_sizeof", None)
SIZES: dict[str, int] = {}


def _size_of(context: Any, kind: Any) -> int:
    """The size of a type in bytes, kept: Numba asks for each variable, and LLVM parses a module for each answer."""
    if isinstance(kind, llvm_ir.IdentifiedStructType):
        return int(SIZE_OF(context, kind))
    key = str(kind)
    if key not in SIZES:
        SIZES[key] = SIZE_OF(context, kind)
    return SIZES[key]


def _unseen(*event: Any, **data: Any) -> None:
    """Ignore an event. It stands in place of Numba's functions that report two events for each call of LLVM."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Within this context, Python's garbage collector is off: it took a sixth of the compile time and freed little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# The functions of Numba that are replaced while kernels compile, if this release has them: whose, which, by what.
SHORTCUTS: list[tuple[Any, str, Any]] = [
    *([(private.BaseFunction, "get_call_type", _signature)] if private.BaseFunction else []),
    *([(private.PostProcessor, "run", _lifetimes)] if private.PostProcessor and private.canonicalize_cfg else []),
    *([(Inst, "_rec_list_vars", _variables)] if private.has_rec_list_vars else []),
    *([(private.BaseContext, "get_abi_sizeof", _size_of)] if private.BaseContext else []),
    *((sys.modules[each.__module__], each.__name__, _unseen) for each in private.events if each),
]


@contextmanager
def shortened() -> Iterator[None]:
    """Within this context, Numba's slow functions are replaced by those above, and it reports no events."""
    with ExitStack() as patches:
        patches.enter_context(uncollected())
        for owner, name, replacement in SHORTCUTS:
            patches.enter_context(patch.object(owner, name, replacement))
        yield

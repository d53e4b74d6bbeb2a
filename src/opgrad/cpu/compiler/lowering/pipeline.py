"""The passes of Numba that a kernel needs, without the bookkeeping for those who watch a compiler.

With them, and an entry that Numba need not compile, 43 kernels take 16 s in place of 26.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from llvmlite import ir as llvm_ir
from numba.core import event, ir, types
from numba.core.base import BaseContext
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager
from numba.core.postproc import PostProcessor
from numba.core.transforms import canonicalize_cfg

# Kernels define no functions, use no `with`, raise nothing and unroll no tuples: passes that look for these find none.
UNNEEDED = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "NoPythonSupportedFeatureValidation",
    "AnnotateTypes",
    "DumpParforDiagnostics",
}


class _Passes(PassManager):
    def _runPass(self, index: int, one: Any, state: Any) -> None:
        one.analysis = self._analysis
        one.run_initialization(state)
        one.run_pass(state)
        one.run_finalizer(state)


class Pipeline(CompilerBase):
    """How the functions of a kernel are compiled, each of them."""

    def define_pipelines(self) -> list[PassManager]:
        if not PASSES:
            everything = DefaultPassBuilder.define_nopython_pipeline(self.state).passes
            passes = _Passes("kernel")
            passes.passes = [each for each in everything if each[0].__name__ not in UNNEEDED]
            passes.finalize()
            PASSES.append(passes)
        return PASSES


PASSES: list[PassManager] = []  # one, the same for all: they are compiled with the same options
SIGNATURES: dict[Any, Any] = {}
RESOLVE = types.BaseFunction.get_call_type


def _signature(function: Any, context: Any, arguments: Any, keywords: Any) -> Any:
    """What a call of these types is; the first time, Numba tries all that an operator may mean to it, one by one."""
    if keywords:
        return RESOLVE(function, context, arguments, keywords)
    key = id(function), arguments
    if key not in SIGNATURES:
        found = RESOLVE(function, context, arguments, keywords)
        SIGNATURES[key] = function, found, function._impl_keys[found.args]
    _, signature, function._impl_keys[signature.args] = SIGNATURES[key]
    return signature


LIFETIMES = PostProcessor.run


def _lifetimes(post: Any, emit_dels: bool = False, **options: Any) -> None:
    """When variables live counts where their ends are written down, before lowering: no other pass of ours asks."""
    if emit_dels or post.func_ir.is_generator:
        LIFETIMES(post, emit_dels, **options)
    else:
        post.func_ir.blocks = canonicalize_cfg(post.func_ir.blocks)
        post.func_ir.generator_info = None


VARIABLES = ir.Inst._rec_list_vars
HOLDS_VARIABLES: dict[type, bool] = {}


def _variables(instruction: Any, value: Any) -> list[Any]:
    """The variables in a value; of most, such as places in the source, the type tells that there are none."""
    kind = type(value)
    if kind is ir.Var:
        return [value]
    holds = HOLDS_VARIABLES.get(kind)
    if holds is None:
        holds = HOLDS_VARIABLES[kind] = issubclass(kind, ir.Var | ir.Inst | list | tuple | dict)
    return VARIABLES(instruction, value) if holds else []


SIZE_OF = BaseContext.get_abi_sizeof
SIZES: dict[str, int] = {}


def _size_of(context: Any, kind: Any) -> int:
    """The bytes of a type, for which LLVM reads a module that has it; Numba asks for each variable."""
    if isinstance(kind, llvm_ir.IdentifiedStructType):
        return int(SIZE_OF(context, kind))
    key = str(kind)
    if key not in SIZES:
        SIZES[key] = SIZE_OF(context, kind)
    return SIZES[key]


def _unseen(*event: Any, **data: Any) -> None:
    """What becomes of Numba's events, of which it has two for each call of LLVM."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Meanwhile nobody looks for garbage, which took a sixth of compiling: a kernel makes much and keeps most of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def shortened() -> Iterator[None]:
    """Meanwhile calls of the same types are resolved once, and nobody is told what the compiler does."""
    with (
        uncollected(),
        patch.object(types.BaseFunction, "get_call_type", _signature),
        patch.object(PostProcessor, "run", _lifetimes),
        patch.object(ir.Inst, "_rec_list_vars", _variables),
        patch.object(BaseContext, "get_abi_sizeof", _size_of),
        patch.multiple(event, start_event=_unseen, end_event=_unseen),
    ):
        yield

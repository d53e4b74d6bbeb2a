"""The passes of Numba that a kernel needs, without the bookkeeping for those who watch a compiler.

With them, and an entry that Numba need not compile, 43 kernels take 16 s in place of 26.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from numba.core import event, types
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager

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


def _unseen(*event: Any, **data: Any) -> None:
    """What becomes of Numba's events, of which it has two for each call of LLVM."""


@contextmanager
def shortened() -> Iterator[None]:
    """Meanwhile calls of the same types are resolved once, and nobody is told what the compiler does."""
    with (
        patch.object(types.BaseFunction, "get_call_type", _signature),
        patch.multiple(event, start_event=_unseen, end_event=_unseen),
    ):
        yield

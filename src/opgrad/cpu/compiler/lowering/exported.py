"""Writes the exported function of an object file, which calls the functions that Numba has compiled."""

import functools
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

from opgrad.cpu.compiler.lowering.modules import linked
from opgrad.cpu.compiler.lowering.numba_private import cpu_target
from opgrad.cpu.compiler.lowering.operations import I64, definition
from opgrad.cpu.compiler.lowering.pipeline import Pipeline

OPTIONS = {
    "error_model": "numpy",
    "boundscheck": False,
    "no_rewrites": True,
    "_nrt": False,
    # Only compiled code calls our functions. Without wrappers for Python and C callers they compile a tenth faster.
    "forceinline": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": Pipeline,
}
NOTHING = ir.FunctionType(ir.VoidType(), ())


def compiled(function: Callable[..., Any], *kinds: Any) -> Any:
    """Compile a function with Numba for arguments of these types; returns its signature, description and library."""
    dispatcher = numba.njit(**OPTIONS)(function)
    dispatcher.compile(kinds)
    return dispatcher.overloads[kinds]


compiled_once = functools.cache(compiled)  # for what every kernel calls


class Exported:
    """A function of int64 arguments and an int64 result, written in LLVM's own instructions."""

    def __init__(self, name: str, count: int):
        self.context = cpu_target.target_context
        self.library = self.context.codegen().create_library(name)
        self._module = self.context.create_module(name)
        self.function = ir.Function(self._module, ir.FunctionType(I64, [I64] * count), name)
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    def call(self, callee: Any, *values: Any) -> Any:
        """The result of a compiled function.

        If the function can fail, the failing path calls a function that does not exist. `optimised` finds that call and
        refuses the kernel, unless LLVM has proved that the path is never taken.
        """
        described, convention = callee.fndesc, self.context.call_conv
        function = self.context.declare_function(self._module, described)
        status, result = convention.call_function(self.builder, function, described.restype, described.argtypes, values)
        with self.builder.if_then(status.is_error, likely=False):
            self.builder.call(get_or_insert_function(self._module, NOTHING, "report_an_error"), ())
        self.library.add_linking_library(callee.library)
        return result

    def emit(self, operation: Callable[..., Any]) -> None:
        """Emit the instructions of an operation without arguments."""
        definition(operation, ())[1](self.context, self.builder)

    def finish(self, result: Any) -> Any:
        """End the function with the value `result`; returns the module, linked with all functions that it calls."""
        self.builder.ret(result)
        self.library.add_ir_module(self._module)
        return linked(self.library)

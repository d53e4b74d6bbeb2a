"""Compiles a Python function to an LLVM module with the exported function that native code calls.

Numba itself optimises every function together with all functions that it calls, and compiles each to machine code,
because Python may call any of them. Our functions are inlined into a kernel, and nobody else calls them. So only the
kernel's module is optimised, once: 16 kernels take 7.4 s; with Numba's way they took 18 s. Numba's compiler is reduced
to the passes that a kernel needs, without its events for debuggers and profilers: 43 kernels take 16 s instead of 26.
"""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from typing import Any
from unittest.mock import patch

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba._dynfunc import make_function
from numba.core import event, types
from numba.core.base import BaseContext
from numba.core.cgutils import get_or_insert_function
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.ir import Inst, Var
from numba.core.postproc import PostProcessor
from numba.core.registry import cpu_target
from numba.core.rewrites.static_getitem import RewriteConstGetitems
from numba.core.transforms import canonicalize_cfg
from numba.extending import overload, register_jitable

from opgrad.cpu.compiler import parameters, words
from opgrad.cpu.compiler.lowering.operations import I64, PointerType, VectorType, definition
from opgrad.cpu.compiler.lowering.words import word_at
from opgrad.cpu.compiler.parameters import (
    IN_USE,
    PER_PART,
    POINTERS,
    PRIVATE,
    PRIVATE_BYTES,
    PRIVATE_HEADER,
    SLOTS,
    UNITS,
    UNITS_HEADER,
    Float,
    Parameters,
    Private,
    fields,
    lanes_of,
)


class _Passes(PassManager):  # type: ignore[misc]
    """Numba's passes, run without the notes that it takes for each."""

    def _runPass(self, index: int, one: Any, state: Any) -> None:
        one.analysis = self._analysis
        one.run_initialization(state)
        one.run_pass(state)
        one.run_finalizer(state)


@register_pass(mutates_CFG=False, analysis_only=False)
class ConstantIndices(FunctionPass):  # type: ignore[misc]
    """Reads elements of tuples at constant places by Numba's instruction for that.

    Without it Numba compiles a function for every place in every tuple, by its own passes: a tenth of the time.
    """

    _name = "opgrad_constant_indices"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        rewrite, blocks = RewriteConstGetitems(), state.func_ir.blocks
        for label, block in blocks.items():
            if rewrite.match(state.func_ir, block, None, None):
                blocks[label] = rewrite.apply()
        return True


# Kernels define no functions, use no `with`, raise nothing and unroll no tuples. These passes look for such things.
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


class Pipeline(CompilerBase):  # type: ignore[misc]
    """The compiler for every function of a kernel: Numba's default passes but those that kernels do not need."""

    def define_pipelines(self) -> list[Any]:
        if not PASSES:
            everything = DefaultPassBuilder.define_nopython_pipeline(self.state).passes
            passes = _Passes("kernel")
            kept = [each for each in everything if each[0].__name__ not in UNNEEDED]
            typing = [each[0].__name__ for each in kept].index("NopythonTypeInference")
            passes.passes = [*kept[:typing], (ConstantIndices, "constant indices"), *kept[typing:]]
            passes.finalize()
            PASSES.append(passes)
        return PASSES


PASSES: list[Any] = []  # one manager for all functions, since all are compiled with the same options
SIGNATURES: dict[Any, Any] = {}
RESOLVE = types.BaseFunction.get_call_type


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


LIFETIMES = PostProcessor.run


def _lifetimes(post: Any, emit_dels: bool = False, **options: Any) -> None:
    """Numba's analysis of variables' lifetimes, done only when it is used: before lowering and for generators.

    Lowering needs it to delete each variable after its last use (`emit_dels`). Other passes of Numba ask for it too,
    but those that are left here do not read its result; they only need the control flow in its canonical form.
    """
    if emit_dels or post.func_ir.is_generator:
        LIFETIMES(post, emit_dels, **options)
    else:
        post.func_ir.blocks = canonicalize_cfg(post.func_ir.blocks)
        post.func_ir.generator_info = None


VARIABLES = Inst._rec_list_vars
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


SIZE_OF = BaseContext.get_abi_sizeof
SIZES: dict[str, int] = {}


def _size_of(context: Any, kind: Any) -> int:
    """The size of a type in bytes, kept: Numba asks for each variable, and LLVM parses a module for each answer."""
    if isinstance(kind, ir.IdentifiedStructType):
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


# The functions of Numba that are replaced while kernels compile: whose, which, by what. It reports no events.
SHORTCUTS: tuple[tuple[Any, str, Any], ...] = (
    (types.BaseFunction, "get_call_type", _signature),
    (PostProcessor, "run", _lifetimes),
    (Inst, "_rec_list_vars", _variables),
    (BaseContext, "get_abi_sizeof", _size_of),
    (event, "start_event", _unseen),
    (event, "end_event", _unseen),
)


class _Library(JITCodeLibrary):  # type: ignore[misc]
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


def _uncallable(library: Any, fndesc: Any, env: Any) -> Any:
    """An object in place of the Python function that Numba makes of a compiled one; only compiled code calls ours."""
    return make_function(fndesc.lookup_module(), fndesc.qualname, "", 0, env, (library,))


def _refresh(context: Any) -> None:
    """Have Numba load its knowledge of NumPy; the first time, keep it from loading SciPy's BLAS, which no kernel calls.

    Numba's module `arraymath` loads that BLAS only to learn whether it exists. Loading OpenBLAS starts threads, takes
    0.2 s, and ends the process if the system refuses threads. Here it is enough to see that SciPy is installed, since
    SciPy always brings a BLAS. A program that multiplies matrices with Numba loads it later, when it compiles that.
    """
    from numba.np import linalg

    if "numba.np.arraymath" in sys.modules:
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
    """Within this context, Numba stops at LLVM's language, and its slow functions are replaced by those above.

    Its global lock is held: it compiles for one thread at a time.
    """
    with global_compiler_lock, uncollected(), ExitStack() as patches:
        context = cpu_target.target_context
        _refresh(context)  # before the patches below: this may compile Numba's own runtime, which must be done in full
        own = (context.codegen(), "_library_class", _Library), (context, "get_executable", _uncallable)
        for owner, name, replacement in (*SHORTCUTS, *own):
            patches.enter_context(patch.object(owner, name, replacement))
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
        return self.library.linked()


def _choose(helper: Callable[..., Any]) -> None:
    @overload(helper, strict=False, jit_options=OPTIONS)
    def _(*arguments: Any) -> Any:
        kind = next(a for a in arguments if isinstance(a, VectorType))
        return helper(kind.bits)


def register_helpers() -> None:
    """Register with Numba the helpers that `inline` and `by_precision` have marked since the last call."""
    while parameters.INLINE:
        register_jitable(**OPTIONS)(parameters.INLINE.pop())
    while parameters.CHOOSE:
        _choose(parameters.CHOOSE.pop())


def type_of(annotation: Any, dtypes: Iterator[str], precision: int, lanes: int) -> Any:
    """The Numba type of a parameter. `dtypes` gives the dtypes of its pointers, and then those of later parameters."""
    inside = [type_of(each, dtypes, precision, lanes) for each in fields(annotation)]
    if inside:
        return types.NamedTuple(inside, annotation) if isinstance(annotation, type) else types.Tuple(inside)
    if annotation in POINTERS:
        return PointerType(next(dtypes), precision, lanes)
    return types.float64 if annotation is Float else types.int64


def _parameters(kernel: Parameters, dtypes: list[str], lanes: int) -> list[Any]:
    """The Numba types of a kernel's arguments."""
    pointers, precision = iter(dtypes), 64 if "float64" in dtypes else 32
    return [type_of(kind, pointers, precision, lanes) for kind in kernel.parameters.values()]


def _read(exported: Exported, annotation: Any, kind: Any, words: Iterator[Any], private: Any) -> Any:
    """Load a parameter from its 8-byte words. The word of private memory is an offset, to which `private` is added."""
    if fields(annotation):
        inside = zip(fields(annotation), kind, strict=True)
        values = [_read(exported, *each, words, private) for each in inside]
        return exported.context.make_tuple(exported.builder, kind, values)
    word, llvm_kind = next(words), exported.context.get_value_type(kind)
    if annotation is Private:
        return exported.builder.inttoptr(exported.builder.add(exported.builder.load(word), private), llvm_kind)
    return exported.builder.load(exported.builder.bitcast(word, llvm_kind.as_pointer()))


def _task(kernel: Parameters, dtypes: list[str], interface: str, name: str) -> Any:
    """A module with the function task(address of the arguments, number of the part), which calls the kernel."""
    exported = Exported(name, 2)
    arguments, part = exported.function.args
    kinds, values, private = [], [], I64(0)

    def places_from(start: int) -> Iterator[Any]:
        return (word_at(exported.builder, arguments, I64(start + place), I64, 8) for place in count())

    def word(place: int) -> Any:
        return exported.builder.load(next(places_from(place)))

    start = UNITS_HEADER if kernel.takes_units or kernel.takes_private else 0
    if start:
        units = compiled_once(units_of, types.int64, types.int64)
        kinds, values = [units.signature.return_type], [exported.call(units, arguments, part)]
    if kernel.takes_part:
        kinds, values = [*kinds, types.int64], [*values, part]
    if kernel.takes_private:
        in_use = word(start + IN_USE)
        slot = exported.call(compiled_once(take_slot, types.int64, types.int64), in_use, word(start + SLOTS))
        own = exported.builder.mul(slot, word(start + PRIVATE_BYTES))
        private = exported.builder.add(word(start + PRIVATE), own)
        start += PRIVATE_HEADER
    given = _parameters(kernel, dtypes, lanes_of(interface))
    places = places_from(start)
    values += [_read(exported, *each, places, private) for each in zip(kernel.parameters.values(), given, strict=True)]
    exported.call(compiled(kernel.function, *kinds, *given), *values)
    if kernel.takes_private:
        exported.call(compiled_once(release_slot, types.int64, types.int64), in_use, slot)
    exported.emit(words.store_fence)
    return exported.finish(I64(0))


@parameters.inline
def units_of(arguments: int, part: int) -> Any:
    """The units of a part, as a range."""
    per_part = words.load_word(arguments, PER_PART)
    begin = part * per_part
    return range(begin, min(begin + per_part, words.load_word(arguments, UNITS)))


@parameters.inline
def take_slot(in_use: int, slots: int) -> int:
    """The number of a slot of private memory that no other part uses; the word at `in_use` has a bit for each.

    Where more threads than slots are at work, which have been set since the call was planned, a part waits for one
    that is done; whoever has a slot waits for nobody.
    """
    while True:
        taken = words.atomic_load(in_use)
        for slot in range(slots):
            if not taken >> slot & 1:
                if words.atomic_swap_if(in_use, taken, taken | 1 << slot):
                    return slot
                break
        words.spin_hint()


@parameters.inline
def release_slot(in_use: int, slot: int) -> None:
    words.atomic_add(in_use, -(1 << slot))


def _native(function: Callable[..., Any], count: int, name: str) -> Any:
    """A module with a function of `count` integers, which calls `function`. It returns 0 if that returns nothing."""
    exported = Exported(name, count)
    callee = compiled(function, *[types.int64] * count)
    result = exported.call(callee, *exported.function.args)
    kind = callee.signature.return_type
    return exported.finish(
        I64(0) if kind == types.none else exported.context.cast(exported.builder, result, kind, types.int64)
    )


def build(function: Callable[..., Any], interface: str, name: str) -> Any:
    """The LLVM module of `function`, exported as `name`, which `optimised` is given.

    interface: that of a task or a native function.
    """
    register_helpers()
    kind, _, inside = interface.rstrip(")").partition("(")
    with unoptimised():
        if kind == "native":
            return _native(function, int(inside), name)
        dtypes = [each for each in inside.split(",") if each]
        return _task(Parameters(function), dtypes, kind, name)

"""Compile Python functions to native code, and keep the code on disk.

Numba turns a function into LLVM IR, and llvmlite turns that into an object file, which is stored in the cache. The next
process links the file into its memory without importing Numba, and without llvmlite where `machine_code` can link.
A cache folder belongs to one CPU and one version of Numba. The name of a file in it is a digest of all that determines
the machine code (`sources`). Numba's own cache is not used, because it notices neither an edit in another file nor a
changed compile flag (numba issues 8359 and 6845).
"""

import ctypes
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from opgrad.base.locks import once, settling
from opgrad.cpu.compiler import machine_code, sources, target
from opgrad.cpu.compiler.parameters import Parameters
from opgrad.cpu.compiler.parameters import by_precision as by_precision
from opgrad.cpu.compiler.parameters import constant as constant
from opgrad.cpu.compiler.parameters import inline as inline
from opgrad.cpu.compiler.target import PACKS_INTO, PackedObjects, host, runs_here, stands_in, told_by_llvm
from opgrad.cpu.compiler.target import interface_of as interface_of
from opgrad.cpu.compiler.target import line_lanes as line_lanes
from opgrad.cpu.compiler.target import many_registers as many_registers
from opgrad.cpu.compiler.target import object_cache as object_cache
from opgrad.cpu.compiler.target import vector_bytes as vector_bytes
from opgrad.cpu.compiler.target import vector_lanes as vector_lanes

EXPORTED = "opgrad_entry"  # the one exported symbol of an object file
# The instruction of a waiting loop on arm64, which a stand-in on another processor does without.
ELSEWHERE = "call void @llvm.aarch64.hint(i32 1)"


def object_code(function: Callable[..., Any], interface: str, symbol: str) -> bytes:
    """The object file of a function compiled for the given interface.

    `symbol` names the module for people who read its code.
    """
    return _code(_lowered(function, interface), symbol, target_machine())


def stand_in(function: Callable[..., Any], interface: str, symbol: str) -> bytes:
    """The object file that computes here what that of `object_code` will on another processor.

    The vectors of both have as many elements.
    """
    return _code(str(_lowered(function, interface)).replace(ELSEWHERE, ""), symbol, own_machine())


def _lowered(function: Callable[..., Any], interface: str) -> Any:
    from opgrad.cpu.compiler import lowering

    return lowering.build(function, interface, EXPORTED)


def _code(lowered: Any, symbol: str, machine: Any) -> bytes:
    from opgrad.cpu.compiler import lowering

    module = lowering.optimised(lowered, EXPORTED, machine)
    module.name = symbol
    return bytes(machine.emit_object(module))


def assembly(function: Callable[..., Any], dtypes: Iterable[str], interface: str = "task") -> str:
    """The assembly text of a kernel's function for pointers of these dtypes, for an interface of `Kernel.task`."""
    from opgrad.cpu.compiler import lowering

    lowered = _lowered(function, f"{interface}({','.join(dtypes)})")
    return str(target_machine().emit_assembly(lowering.optimised(lowered, EXPORTED, target_machine())))


@functools.cache
def target_machine() -> Any:
    """LLVM's target machine for the processor that code is for, at optimisation level 3."""
    import llvmlite.binding as llvm

    processor = target.named()
    if processor is None:
        return _machine(llvm.get_process_triple(), *host(), machine_code.HERE)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return _machine(processor.triple, processor.cpu, processor.features, True)


@functools.cache
def own_machine() -> Any:
    """LLVM's target machine for the processor that is here."""
    import llvmlite.binding as llvm

    return _machine(llvm.get_process_triple(), *told_by_llvm(), machine_code.HERE)


def _machine(triple: str, cpu: str, features: str, near: bool) -> Any:
    """A target machine.

    near: whether its code finds constants by distances, which fit into instructions. Otherwise LLVM, which links code
    for itself, takes addresses of 64 bits: an instruction and a register for each.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    model = {"reloc": "pic", "codemodel": "small"} if near else {"jit": True}
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3, **model)


STAND_IN = ".here"  # the suffix of what runs here in place of code for a processor that is not here


class Native:
    """A function of int64 parameters and an int64 result, callable from C at `address`."""

    def __init__(self, function: Callable[..., int], count: int):
        self.function = function
        self.count = count
        functools.update_wrapper(self, function)

    @once
    def address(self) -> int:
        return self.link()

    def link(self) -> int:
        """Compile the function, or load it from the cache; its address."""
        return _link(self.function, self.interface)

    def compile(self, interface: str) -> None:
        """Compile it for an interface as `processes.named` has written it."""
        self.link()

    @property
    def interface(self) -> str:
        """The interface for which `emit` compiles the function: "native" and the number of its parameters."""
        return f"native({self.count})"

    @once
    def call(self) -> Callable[..., int]:
        """The function as ctypes calls it from Python; it runs without the interpreter's lock."""
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * self.count)(self.address)


def native(count: int) -> Callable[[Callable[..., int]], Native]:
    """A decorator for a function of `count` int64 parameters, which is compiled when its address is first needed."""
    return lambda function: Native(function, count)


class Kernel(Parameters):
    """A function that does some units of the work; `task` compiles it to a native function `task(arguments, part)`."""

    def __init__(self, function: Callable[..., None]):
        super().__init__(function)
        self._tasks: dict[tuple[str, ...], int] = {}
        functools.update_wrapper(self, function)

    def task(self, dtypes: Iterable[str], interface: str = "task") -> int:
        """The address of the kernel compiled for pointers of these dtypes, in the order of its parameters.

        interface: "task", or "task of 32" for vectors of 32 elements, not as many as `vector_lanes` says. A task ends
        with a store fence, which waits for non-temporal stores.
        """
        key = (interface, *dtypes)
        found = self._tasks.get(key)
        if found is None:
            found = _link(self.function, f"{interface}({','.join(key[1:])})", noted=True)
            if found:
                self._tasks[key] = found
        return found

    def compile(self, interface: str) -> None:
        """Compile it for an interface as `processes.named` has written it."""
        kind, _, dtypes = interface.rstrip(")").partition("(")
        self.task(dtypes.split(",") if dtypes else [], kind)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a kernel; see `Kernel`."""
    return Kernel(function)


_notes: list[tuple[Collection[str], dict[str, None]]] = []  # names that are wanted nevertheless, and missing ones


@contextmanager
def noting(wanted: Collection[str] = ()) -> Iterator[dict[str, None]]:
    """Within this context, kernels that the cache lacks are not compiled; the names of their objects are noted instead.

    Plans that are made within it lack kernels and must not be run. wanted: names of objects that are compiled
    nevertheless. Yields the noted names, to which later ones are added.
    """
    with settling:
        _notes.append((wanted, {}))
        try:
            yield _notes[-1][1]
        finally:
            _notes.pop()


def is_unfinished() -> bool:
    """Whether kernels are only noted at present, or compiled to be run elsewhere, so that plans must not be kept."""
    return bool(_notes) or not (runs_here() or stands_in())


def _link(function: Callable[..., Any], interface: str, noted: bool = False) -> int:
    """The address of `function`, loaded or compiled; 0 if it was only noted (see `noting`), which `noted` permits."""
    with settling:
        name, cache = sources.object_name(function, interface), object_cache()
        code = cache.read(name) if name else None
        if code is None and name and noted and _notes:
            wanted, missing = _notes[-1]
            if name not in wanted:
                missing[name] = None
                return 0
        if code is None and isinstance(cache, PackedObjects) and not cache.compiles:
            raise cache.lacking(_symbol(function, interface))
        if code is None and name is not None:  # processes that are running, or are started now, may compile it first
            from opgrad.cpu.compiler import processes

            processes.compile_first(function, interface, name)
            code = cache.read(name)
        code = code or _made_here(function, interface, name)
        if runs_here():
            return _load(code)
        return _load(_stand_in(function, interface, name)) if stands_in() or not noted else 0


def _stand_in(function: Callable[..., Any], interface: str, name: str | None) -> bytes:
    """Code that computes here what that for another processor will compute there."""
    code = object_cache().read(name, STAND_IN) if name else None
    if code is None:
        code = stand_in(function, interface, _symbol(function, interface))
        if name:
            object_cache().write(name, code, STAND_IN)
    return code


def _made_here(function: Callable[..., Any], interface: str, name: str | None) -> bytes:
    symbol = _symbol(function, interface)
    if name is None:
        if PACKS_INTO in os.environ:
            raise RuntimeError(f"opgrad: {symbol} cannot be packed: its sources have no digest")
        return object_code(function, interface, symbol)
    with object_cache().claim(name):
        code = object_cache().read(name)  # another process may have stored it while this one waited for the claim
        if code is None:
            code = object_code(function, interface, symbol)
            if sources.compiler_is_imported():
                object_cache().write(name, code)
    return code


def _symbol(function: Callable[..., Any], interface: str) -> str:
    return f"{function.__module__}.{function.__qualname__}.{interface}"


def _load(code: bytes) -> int:
    address = machine_code.link(code, EXPORTED)
    return _load_with_llvm(code) if address is None else address


def _load_with_llvm(code: bytes) -> int:
    import llvmlite.binding as llvm

    target_machine()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    for name, address in machine_code.named.items():
        llvm.add_symbol(name, address)
    # All sections in one mapping: apart, they may be out of reach of distances in 32 bits, and LLVM aborts.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = int(engine.get_function_address(EXPORTED))
    engine.detach()  # threads may still run the code when the interpreter ends: it is never freed
    return address

"""The arguments of a launch, compared with what the kernel was compiled for."""

import ctypes

from ptx.parser import PtxError

BITS = {"i1": 8, "u1": 8, "fp16": 16, "bf16": 16, "fp32": 32, "f32": 32, "fp64": 64, "f64": 64}
SCRATCH = 2  # parameters behind a kernel's own: Triton's working memory, of which our kernels need none


def values_of(kernel, parameters):
    """The bits of each argument, behind an array of pointers as long as the list of parameters."""
    pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
    kinds = {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64}
    return [
        ctypes.cast(pointers[place], ctypes.POINTER(kinds[parameter.type.bits])).contents.value
        for place, parameter in enumerate(kernel.parameters)
    ]


def check(kernel, source, values, memory):
    """Compare arguments with the signature that Triton compiled for: their number, sizes, kinds and divisibility.

    Raises PtxError, naming kernel and parameter.
    """
    if source is None:
        return
    expected = list(_parameters(source))
    if len(expected) + SCRATCH != len(kernel.parameters):
        raise PtxError(f"{kernel.name}: compiled for {len(kernel.parameters)} parameters, {len(expected)} in Triton")
    for (path, name, kind), parameter, value in zip(expected, kernel.parameters, values, strict=False):
        where = f"{kernel.name}: {name} is {value:#x}"
        bits = 64 if kind.startswith("*") else BITS.get(kind) or int(kind.lstrip("iu"))
        if bits != parameter.type.bits or kind.startswith("*") != parameter.pointer:
            raise PtxError(f"{where}, {parameter.type.name} in PTX, expected {kind}")
        divisor = _divisor(source, path)
        if value % divisor:
            raise PtxError(f"{where}, compiled for multiples of {divisor}")
        if parameter.pointer and value and not _is_lent(memory, value):
            raise PtxError(f"{where}: {memory.beside(value)}")
    if any(values[len(expected) :]):
        raise PtxError(f"{kernel.name}: Triton's own working memory is not expected")


def _parameters(source):
    """Path, name and type of each parameter that is no constant; tuples are spread."""

    def spread(path, name, kind):
        if isinstance(kind, tuple):
            for place, each in enumerate(kind):
                yield from spread((*path, place), f"{name}[{place}]", each)
        elif kind != "constexpr":
            yield path, name, kind

    for place, (name, kind) in enumerate(source.signature.items()):
        yield from spread((place,), name, kind)


def _divisor(source, path):
    found = dict(source.attrs.get(path, ()))
    return int(found.get("tt.divisibility", 1))


def _is_lent(memory, address):
    """Whether an address is one of an array, or of its end, where an empty one begins."""
    return any(each.address <= address <= each.end for each in memory.allocations)

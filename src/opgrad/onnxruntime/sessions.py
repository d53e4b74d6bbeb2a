"""Sessions of the stock onnxruntime with opgrad's operators, which are registered without a compiled library.

On Linux (x86-64, arm64) `register_custom_ops_library` loads a shared object that Python has written: its
`RegisterCustomOps` jumps to the address in `opgrad_slot`. On other systems the C pointer of the session options is
passed to the C library in the onnxruntime package.
"""

import atexit
import ctypes
import functools
import os
import platform
import struct
import sys
import tempfile
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opgrad.base.files import check_regular
from opgrad.base.locks import settling
from opgrad.onnxruntime import abi, private
from opgrad.onnxruntime.abi import Api, address_of, callback, forever

try:
    import onnxruntime
except ImportError as error:
    missing = "opgrad.onnxruntime: onnxruntime cannot be imported; install it with: pip install 'opgrad[onnx]'"
    raise ImportError(missing) from error

ENTRY, SLOT = "RegisterCustomOps", "opgrad_slot"
SLOT_BYTES = 8
PAGE = 0x10000  # the largest page size of any Linux on these processors

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
SYMBOL = struct.Struct("<IBBHQQ")
DYNAMIC = struct.Struct("<QQ")

SHARED_OBJECT = 3
SEGMENTS = 4
LOAD, DYNAMIC_SEGMENT, GNU_STACK = 1, 2, 0x6474E551
EXECUTE, WRITE, READ = 1, 2, 4
NULL, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, SONAME = 0, 4, 5, 6, 10, 11, 14
GLOBAL_FUNCTION, GLOBAL_OBJECT = 0x12, 0x11
DEFINED = 1  # any section index but 0 and the absolute one: the loader then adds the load address


def jump_x86_64(source: int, slot: int) -> bytes:
    """`endbr64; jmp *slot(%rip)` for code that stands at `source`."""
    code = bytes.fromhex("f30f1efa ff25")
    return code + struct.pack("<i", slot - (source + len(code) + 4))


def jump_aarch64(source: int, slot: int) -> bytes:
    """`bti c; adrp x16, slot; ldr x16, [x16, slot's offset in its page]; br x16`."""
    pages = (slot >> 12) - (source + 4 >> 12)
    address_page = 0x90000000 | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5 | 16
    load = 0xF9400000 | (slot & 0xFFF) // 8 << 10 | 16 << 5 | 16
    return struct.pack("<4I", 0xD503245F, address_page, load, 0xD61F0200)


# machine as the system names it -> (ELF's number for it, its jump through the slot)
MACHINES = {"x86_64": (62, jump_x86_64), "aarch64": (183, jump_aarch64)}


def _aligned(offset: int) -> int:
    return -(-offset // 16) * 16


def _segment(kind: int, flags: int, offset: int, address: int, size: int, alignment: int) -> bytes:
    return SEGMENT.pack(kind, flags, offset, address, address, size, size, alignment)


def shared_object(machine: str, name: str) -> bytes:
    """The bytes of the shared object `name` for a machine of `MACHINES`."""
    number, jump = MACHINES[machine]
    names = [each.encode() + b"\0" for each in (ENTRY, SLOT, name)]
    strings = b"\0" + b"".join(names)
    entry_name, slot_name, soname = (1 + sum(map(len, names[:index])) for index in range(3))
    symbols_at = _aligned(HEADER.size + SEGMENTS * SEGMENT.size)
    hash_at = symbols_at + 3 * SYMBOL.size
    one_bucket = struct.pack("<6I", 1, 3, 1, 0, 2, 0)  # buckets, symbols, first symbol; then each one's next
    strings_at = hash_at + len(one_bucket)
    code_at = _aligned(strings_at + len(strings))
    code_end = code_at + len(jump(0, 0))
    # The data follow in the file, but stand on a page of their own in memory.
    data_at = _aligned(code_end)
    data_address = data_at + PAGE
    table = {HASH: hash_at, STRTAB: strings_at, SYMTAB: symbols_at, STRSZ: len(strings), SYMENT: SYMBOL.size}
    dynamic = b"".join(DYNAMIC.pack(*pair) for pair in [*table.items(), (SONAME, soname), (NULL, 0)])
    slot_address = data_address + len(dynamic)
    data = dynamic + bytes(SLOT_BYTES)
    header_sizes = (HEADER.size, SEGMENT.size, SEGMENTS, 0, 0, 0)
    parts = {
        0: HEADER.pack(b"\x7fELF\x02\x01\x01", SHARED_OBJECT, number, 1, 0, HEADER.size, 0, 0, *header_sizes)
        + _segment(LOAD, READ | EXECUTE, 0, 0, code_end, PAGE)
        + _segment(LOAD, READ | WRITE, data_at, data_address, len(data), PAGE)
        + _segment(DYNAMIC_SEGMENT, READ | WRITE, data_at, data_address, len(dynamic), 8)
        + _segment(GNU_STACK, READ | WRITE, 0, 0, 0, 16),
        symbols_at: SYMBOL.pack(0, 0, 0, 0, 0, 0)
        + SYMBOL.pack(entry_name, GLOBAL_FUNCTION, 0, DEFINED, code_at, code_end - code_at)
        + SYMBOL.pack(slot_name, GLOBAL_OBJECT, 0, DEFINED, slot_address, SLOT_BYTES),
        hash_at: one_bucket,
        strings_at: strings,
        code_at: jump(code_at, slot_address),
        data_at: data,
    }
    image = bytearray(data_at + len(data))
    for offset, part in parts.items():
        image[offset : offset + len(part)] = part
    return bytes(image)


NAME = "libopgrad_onnxruntime.so"
PATTERNS = ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll")

_received: list[tuple[int, int]] = []


def options_and_base(options: Any) -> tuple[int, int]:
    """The C pointer of a SessionOptions object and an OrtApiBase that can work on it.

    RuntimeError on a system where there is no way to them.
    """
    if sys.platform == "linux" and platform.machine() in MACHINES:
        options.register_custom_ops_library(_stub())  # whose RegisterCustomOps jumps to `_receive`
        return _received.pop()
    pointer = private.options_pointer(options)
    if pointer is None:
        raise _unknown("its SessionOptions is not the object that we know")
    get_base = _package_library().OrtGetApiBase
    get_base.restype = ctypes.c_size_t
    return pointer, get_base()


def _receive(options: int, base: int) -> int:
    _received.append((options, base))
    return 0


@functools.cache
def _stub() -> str:
    """The path of the shared object, loaded and pointing at `_receive`."""
    path = write(shared_object(platform.machine(), NAME))
    receive = forever(callback(_receive, ctypes.c_size_t, 2))
    ctypes.c_size_t.in_dll(ctypes.CDLL(path), SLOT).value = address_of(receive)
    return path


def write(image: bytes) -> str:
    """A path that the image can be loaded from, for as long as the process lives."""
    try:
        descriptor = os.memfd_create(NAME)
        path = f"/proc/self/fd/{descriptor}"
    except OSError:
        descriptor, path = tempfile.mkstemp(NAME)
        atexit.register(_remove, path, os.getpid())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(image)
    return path


def _remove(path: str, owner: int) -> None:
    """Remove a file at exit, but only in the process that made it: a forked child runs this function, too."""
    if os.getpid() == owner:
        Path(path).unlink(missing_ok=True)


@functools.cache
def _package_library() -> ctypes.CDLL:
    folder = Path(onnxruntime.__file__).parent / "capi"
    found = [path for pattern in PATTERNS for path in sorted(folder.glob(pattern))]
    if not found:
        raise _unknown("it comes without its C library")
    return ctypes.CDLL(str(found[0]))


def _unknown(reason: str) -> RuntimeError:
    return RuntimeError(
        f"opgrad.onnxruntime: cannot register operators with onnxruntime {onnxruntime.__version__} on"
        f" {sys.platform} {platform.machine()}: {reason}; expected Linux on x86_64 or aarch64, or the package"
        " that `pip install onnxruntime` gets"
    )


CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_registered: "weakref.WeakSet[onnxruntime.SessionOptions]" = weakref.WeakSet()


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Let sessions made with these options run ONNX Runtime's training operators on the CPU.

    session_options: an onnxruntime.SessionOptions; registering it again changes nothing. With onnxruntime-gpu, sessions
        whose providers have CUDAExecutionProvider run those with a CUDA kernel on the device.

    Raises TypeError for any other object, RuntimeError if onnxruntime is older than 1.18 or this system gives
    no way to register operators. `opgrad ops` lists the operators.
    """
    if not isinstance(session_options, onnxruntime.SessionOptions):
        kind = type(session_options).__name__
        raise TypeError(f"register: session_options is of type {kind}, expected onnxruntime.SessionOptions")
    if _release(onnxruntime.__version__) < _release(abi.NEEDED):
        raise abi.too_old()
    with settling:
        if session_options not in _registered:
            options, base = options_and_base(session_options)
            api = abi.table(base)
            for domain in _domains(api.address):
                api.check(abi.ADD_CUSTOM_OP_DOMAIN, options, domain)
            _registered.add(session_options)


def InferenceSession(
    model: str | bytes | os.PathLike[str],
    sess_options: onnxruntime.SessionOptions | None = None,
    providers: Any = ("CPUExecutionProvider",),
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """An onnxruntime.InferenceSession that knows opgrad's operators.

    model: path or bytes of an ONNX model. In bytes, products of unsigned and signed bytes, which saturate in
        onnxruntime on processors without VNNI, become those of unsigned ones where onnx is installed.
    sess_options: registered with `register`; None: new ones.
    providers, kwargs: as in onnxruntime. With CUDAExecutionProvider, operators that have a CUDA kernel run on the
        device. Where that provider is lacking, the session runs on the CPU with a RuntimeWarning if the providers name
        the CPU's, too.

    Raises what `register` and onnxruntime.InferenceSession raise, and RuntimeError if CUDAExecutionProvider alone is
    asked for and lacking.
    """
    options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
    register(options)
    if isinstance(model, str | os.PathLike) and Path(model).exists():  # onnxruntime itself reports a missing file
        check_regular(Path(model), f"InferenceSession: {os.fspath(model)}")
    if isinstance(model, bytes) and find_spec("onnx"):
        from opgrad.onnxruntime.exact_products import with_exact_products

        model = with_exact_products(model)
    try:
        session = onnxruntime.InferenceSession(model, options, providers=providers, **kwargs)
    except Exception as error:
        for symptom, remedy in private.REMEDIES.items():
            if symptom in str(error):
                error.add_note(f"opgrad.onnxruntime: {remedy}")
        raise
    asked = [each if isinstance(each, str) else each[0] for each in providers or ()]
    if CUDA in asked and CUDA not in session.get_providers():
        text = f"InferenceSession: providers has {CUDA}, but onnxruntime {onnxruntime.__version__} {lacking_cuda()}"
        if CPU not in asked:
            raise RuntimeError(f"{text}; or {CPU} for the CPU")
        warnings.warn(f"{text}; the session runs on the CPU", RuntimeWarning, stacklevel=2)
    return session


def lacking_cuda() -> str:
    """What a session without CUDA's provider lacks, in words."""
    if CUDA in onnxruntime.get_available_providers():
        return "finds no CUDA device here, or not the libraries that its log names, expected CUDA's driver and these"
    return "has no CUDA provider, expected onnxruntime-gpu: pip uninstall onnxruntime; pip install onnxruntime-gpu"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


@functools.cache
def _domains(api: int) -> list[int]:
    """The operator domains, for each copy of onnxruntime's C library in the process."""
    from opgrad.onnxruntime.custom_ops import new_domains

    return new_domains(Api(api), cuda=CUDA in onnxruntime.get_available_providers())

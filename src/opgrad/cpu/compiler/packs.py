"""Packs of kernels: one file with object code for several processors, from which kernels are served without a compiler.

`opgrad compile --for` makes such a file. The variable OPGRAD_KERNELS names it, or a wheel carries it beside this
package; then kernels come from it alone, and Numba and llvmlite are not needed. Like what lies in the cache, the code
is executed. So a pack is read only if nobody else can write to it (`trust`), if its checksums are right, and if it was
made by the sources and for the build of Python that read it.

The file begins with MAGIC, the SHA-256 of the index and the index's length in 8 bytes. The index, in JSON, says what
the pack was made with, and where the code of each kernel lies behind it, by processor and name. Each code is
compressed, and has a checksum over processor, name and code.
"""

import functools
import hashlib
import json
import os
import shlex
import stat
import sys
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from opgrad.cpu.compiler import sources, trust
from opgrad.cpu.compiler.cache import MOST_BYTES, READ
from opgrad.cpu.compiler.processors import PROCESSORS, Processor, is_here

VARIABLE = "OPGRAD_KERNELS"
CARRIED = os.path.join(sources.ROOT, "opgrad", "kernels.pack")  # that of a wheel
MAGIC = b"opgrad\0\1"
LENGTH_AT, INDEX_AT = len(MAGIC) + 32, len(MAGIC) + 40
MOST_INDEX = 1 << 26  # bytes
Index = dict[str, Any]


class PackError(RuntimeError):
    """A pack cannot be used; the message says why, and what to do."""


class LackingError(NotImplementedError):
    """The pack that serves kernels lacks one; the message names it."""


class Place(NamedTuple):
    """Where the compressed code of a kernel lies behind the index: offset and bytes; and the code's checksum."""

    offset: int
    size: int
    checksum: str


def python() -> list[Any]:
    """The build of Python that code is for: it reads fields of objects, and is found by the bytecode of its source."""
    return [sys.implementation.cache_tag, object.__basicsize__, sys.maxsize, sys.platform]


def made_with() -> Index:
    """What a pack must have been made with, to be of use here."""
    release, compiler = sys.modules["opgrad"].__version__, sources.COMPILER  # the package is always imported first
    return {"opgrad": release, "python": python(), "sources": compiler.hex() if compiler else ""}


def checksum(processor: str, name: str, code: bytes) -> str:
    return hashlib.sha256(f"{processor}/{name}\0".encode() + code).hexdigest()


def packed(kernels: Mapping[str, Mapping[str, bytes]]) -> bytes:
    """The bytes of a pack with this code, by processor and name."""
    body, index = bytearray(), made_with() | {"kernels": {}}
    for processor, codes in sorted(kernels.items()):
        places = index["kernels"][processor] = {}
        for name, code in sorted(codes.items()):
            compressed = zlib.compress(code, 9)
            places[name] = Place(len(body), len(compressed), checksum(processor, name, code))
            body += compressed
    text = json.dumps(index, separators=(",", ":")).encode()
    return MAGIC + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + text + bytes(body)


class Pack:
    """A pack's open file and its index. Raises PackError if it cannot be used.

    path: absolute. trusted: whether its folder needs no check, since the package itself was imported from there.
    """

    def __init__(self, path: str, trusted: bool = False):
        self.path = path
        try:
            self._descriptor = _opened(path, trusted)
        except trust.UntrustedError as problem:
            raise PackError(f"{path} is not used: {problem}") from None
        except OSError as error:
            raise PackError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._begin, self.index = self._read_index()
            self._check()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _read_index(self) -> tuple[int, Index]:
        status = os.fstat(self._descriptor)
        head = os.pread(self._descriptor, INDEX_AT, 0) if stat.S_ISREG(status.st_mode) else b""
        if not head.startswith(MAGIC) or len(head) < INDEX_AT:
            raise PackError(f"{self.path} is no pack of kernels, expected a file made by `opgrad compile --for`")
        length = int.from_bytes(head[LENGTH_AT:], "little")
        text = os.pread(self._descriptor, length, INDEX_AT) if length <= min(MOST_INDEX, status.st_size) else b""
        if hashlib.sha256(text).digest() != head[len(MAGIC) : LENGTH_AT]:
            raise self._damaged()
        try:
            index = json.loads(text)
        except (ValueError, RecursionError):
            index = None
        if not _is_index(index):
            raise PackError(f"{self.path} is damaged: its index is not as `opgrad compile --for` writes it")
        return INDEX_AT + length, index

    def _check(self) -> None:
        for what, here in made_with().items():
            there = self.index.get(what)
            if there != here:
                told = "other sources of opgrad" if what == "sources" else f"{what} {_shown(there)}, not {_shown(here)}"
                raise PackError(f"{self.path} was made with {told}: make it anew with `opgrad compile --for`")

    def processor(self, wanted: str | None) -> str:
        """The name of the processor whose kernels are used: `wanted` if the pack has it, else the best that is here."""
        names = list(self.index["kernels"])
        fitting = [name for name in PROCESSORS if name in names and is_here(PROCESSORS[name])]
        if not fitting:
            here = [name for name, processor in PROCESSORS.items() if is_here(processor)]
            known = f"which is {here[-1]}" if here else "of which none is known"
            text = f"{self.path} has kernels for {', '.join(names)}, not for the processor here, {known}"
            raise PackError(text + (f": opgrad compile --for {here[-1]} … -o {self.path} adds them" if here else ""))
        return wanted if wanted in fitting else fitting[-1]

    def read(self, processor: str, name: str) -> bytes | None:
        """The code of a kernel; None if the pack has none of this name. PackError if it is damaged."""
        found = self.index["kernels"].get(processor, {}).get(name)
        if found is None:
            return None
        place = Place(*found)
        data = os.pread(self._descriptor, min(place.size, MOST_BYTES), self._begin + place.offset)
        try:
            code = zlib.decompressobj().decompress(data, MOST_BYTES)
        except zlib.error:
            raise self._damaged() from None
        if checksum(processor, name, code) != place.checksum:
            raise self._damaged()
        return code

    def everything(self) -> dict[str, dict[str, bytes]]:
        """All code, by processor and name."""
        return {
            processor: {name: self.read(processor, name) or b"" for name in places}
            for processor, places in self.index["kernels"].items()
        }

    def _damaged(self) -> PackError:
        return PackError(f"{self.path} is damaged: its checksum is wrong")


def _is_index(index: Any) -> bool:
    """Whether an index, whose checksum is right, says of each kernel where it is."""
    kernels = index.get("kernels") if isinstance(index, dict) else None
    if not isinstance(kernels, dict) or not all(isinstance(each, dict) for each in kernels.values()):
        return False
    return all(
        isinstance(place, list)
        and [*map(type, place)] == [int, int, str]
        and 0 <= min(place[:2]) <= max(place[:2]) <= sys.maxsize // 2
        for places in kernels.values()
        for place in places.values()
    )


def _opened(path: str, trusted: bool) -> int:
    if trusted:
        return os.open(path, READ)
    with trust.opened(os.path.dirname(path), sticky=True) as place:
        descriptor = os.open(place.file(os.path.basename(path)), READ, dir_fd=place.descriptor)
    try:
        trust.check(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


class PackedObjects:
    """The pack in service, in place of the cache (`cache.ObjectCache`): nothing is compiled, and nothing is written."""

    folder = None

    def __init__(self, pack: Pack, processor: str):
        self.pack, self.name = pack, processor
        self.processor: Processor = PROCESSORS[processor]

    def read(self, name: str) -> bytes | None:
        return self.pack.read(self.name, name)

    def count(self) -> int:
        return len(self.pack.index["kernels"][self.name])

    def problem(self) -> str:
        return (
            f"they come from {self.pack.path}, which {VARIABLE} names, or a wheel carries; {VARIABLE}= turns that off"
        )

    def lacking(self, kernel: str) -> LackingError:
        """The exception for a kernel that the pack lacks."""
        return LackingError(f"{self.pack.path} has no kernel {kernel} for {self.name}; {self._advice()}")

    def _advice(self) -> str:
        program = shlex.join(sys.argv) if sys.argv and os.path.isfile(sys.argv[0]) else "PROGRAM.py"
        command = f"opgrad compile --for {self.name} --run {shlex.quote(program)} -o {shlex.quote(self.pack.path)}"
        return f"where Numba is installed, `{command}` adds those of the program"


@functools.cache
def served() -> PackedObjects | None:
    """The pack that OPGRAD_KERNELS names, else the one that a wheel carries; None if there is none, or "" is named."""
    named = os.environ.get(VARIABLE)
    if named == "" or (named is None and not os.path.exists(CARRIED)):
        return None
    path = CARRIED if named is None else os.path.join(os.getcwd(), named)
    pack = Pack(path, trusted=named is None)
    return PackedObjects(pack, pack.processor(os.environ.get("NUMBA_CPU_NAME")))

"""Packs: cache folders of several processors in one file, from which kernels are served without a compiler.

`opgrad compile --for` fills a folder (`cache.ObjectCache`) for each processor, and puts them into a ZIP archive. A
wheel carries one beside this package, or the variable OPGRAD_KERNELS names another; then kernels come from it, and
Numba compiles, where it is installed, only what the pack lacks. Like the files in the cache, the code is executed. So
a pack is read only if nobody else can write to it (`trust`), if its checksums, which are the cache's, are right, and if
it was made by the sources and for the build of Python that read it: the file MADE_WITH says so.
"""

import functools
import io
import json
import os
import shlex
import sys
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, NamedTuple

from opgrad.cpu.compiler import sources, trust
from opgrad.cpu.compiler.cache import MOST_BYTES, SUFFIX, ObjectCache
from opgrad.cpu.compiler.processors import PROCESSORS, is_here

VARIABLE = "OPGRAD_KERNELS"
CARRIED = os.path.join(sources.ROOT, "opgrad", "kernels.pack")  # that of a wheel
MADE_WITH = "made_with.json"
MOST_PACK = 1 << 30  # bytes; the plain calls of all operators take 4 MB for each processor
COMPILER = 'pip install "opgrad[compiler]"'  # brings Numba
NO_TIME = (1980, 1, 1, 0, 0, 0)  # the first that an archive can state: equal folders make equal packs


class PackError(RuntimeError):
    """A pack cannot be used; the message says why, and what to do."""


class OutdatedError(PackError):
    """A pack was made with another release, other sources or another Python."""


class LackingError(NotImplementedError):
    """The pack that serves kernels lacks one; the message names it."""


def python() -> list[Any]:
    """The build of Python that code is for: it reads fields of objects, and is found by the bytecode of its source."""
    return [sys.implementation.cache_tag, object.__basicsize__, sys.maxsize, sys.platform]


def made_with() -> dict[str, Any]:
    """What a pack must have been made with, to be of use here."""
    release, compiler = sys.modules["opgrad"].__version__, sources.COMPILER  # the package is always imported first
    return {"opgrad": release, "python": python(), "sources": compiler.hex() if compiler else ""}


def packed(folder: str) -> bytes:
    """The bytes of a pack with the cache folders that lie in this folder, each named by its processor."""
    from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        archive.writestr(ZipInfo(MADE_WITH, NO_TIME), json.dumps(made_with()))
        for processor in sorted(os.listdir(folder)):
            for name in sorted(os.listdir(os.path.join(folder, processor))):
                if name.endswith(SUFFIX):
                    with open(os.path.join(folder, processor, name), "rb") as code:
                        archive.writestr(ZipInfo(f"{processor}/{name}", NO_TIME), code.read(), ZIP_DEFLATED, 9)
    return file.getvalue()


class Pack:
    """A pack. Raises PackError if it cannot be used.

    path: absolute. trusted: whether its folder needs no check, since the package itself was imported from there.
    names: of its kernels, by processor.
    """

    def __init__(self, path: str, trusted: bool = False):
        from zipfile import ZipFile

        self.path = path
        try:
            data = trust.contents(*os.path.split(path), MOST_PACK, sticky=True, trusted=trusted)
        except trust.UntrustedError as problem:
            raise PackError(f"{path} is not used: {problem}") from None
        except OSError as error:
            raise PackError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._archive = ZipFile(io.BytesIO(data))
            index = json.loads(self.contents(MADE_WITH))
        except Exception:  # of many kinds, according to where the archive is damaged
            expected = "expected a file made by `opgrad compile --for`"
            raise PackError(f"{path} is no pack of kernels, or is damaged: {expected}") from None
        self._check(index if isinstance(index, dict) else {})
        self.names: dict[str, list[str]] = {}
        for file in self._archive.namelist():
            processor, _, name = file.partition("/")
            if name.endswith(SUFFIX):
                self.names.setdefault(processor, []).append(name.removesuffix(SUFFIX))

    def _check(self, index: dict[str, Any]) -> None:
        for what, here in made_with().items():
            there = index.get(what)
            if there != here:
                told = "other sources of opgrad" if what == "sources" else f"{what} {_shown(there)}, not {_shown(here)}"
                raise OutdatedError(f"{self.path} was made with {told}: make it anew with `opgrad compile --for`")

    def contents(self, file: str) -> bytes:
        """The bytes of a file in the pack; any exception if it is damaged."""
        if self._archive.getinfo(file).file_size > MOST_BYTES:
            raise ValueError
        return self._archive.read(file)

    def processor(self, wanted: str | None) -> str:
        """The name of the processor whose kernels are used: `wanted` if the pack has it, else the best that is here."""
        here = [name for name, processor in PROCESSORS.items() if is_here(processor)]
        fitting = [name for name in here if name in self.names]
        if not fitting:
            known = f"which is {here[-1]}" if here else "of which none is known"
            text = f"{self.path} has kernels for {', '.join(self.names)}, not for the processor here, {known}"
            raise PackError(f"{text}: {VARIABLE}= and {COMPILER} compile them here")
        return wanted if wanted in fitting else fitting[-1]


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


class PackedObjects(ObjectCache):
    """The cache folder of a processor in a pack, which nothing is written to.

    compiled: the cache of what the pack lacks; None where no compiler is installed.
    """

    def __init__(self, pack: Pack, processor: str, compiled: ObjectCache | None = None):
        super().__init__(processor, None)
        self.pack, self.name, self.compiled = pack, processor, compiled
        self.folder = compiled and compiled.folder

    def read(self, name: str, suffix: str = SUFFIX) -> bytes | None:
        """The code of a kernel; None if it is neither in the pack nor compiled. PackError if the pack is damaged."""
        if name not in self.pack.names.get(self.name, ()):
            return self.compiled.read(name, suffix) if self.compiled else None
        try:
            code = self.checked(name, self.pack.contents(f"{self.name}/{name}{suffix}"))
        except Exception:  # of many kinds, as above
            code = None
        if code is None:
            raise PackError(f"{self.pack.path} is damaged: its checksum is wrong")
        return code

    def write(self, name: str, code: bytes, suffix: str = SUFFIX) -> None:
        if self.compiled:
            self.compiled.write(name, code, suffix)

    def claim(self, name: str) -> AbstractContextManager[None]:
        return (self.compiled or super()).claim(name)

    def count(self) -> int:
        return len(self.pack.names[self.name]) + (self.compiled.count() if self.compiled else 0)

    def problem(self) -> str:
        if self.compiled:
            return self.compiled.problem()
        return f"they come from {self.pack.path}, and Numba is not installed: {COMPILER}"

    def lacking(self, kernel: str) -> LackingError:
        """The exception for a kernel that the pack lacks."""
        advice = f"{COMPILER} compiles it here"
        if self.pack.path != CARRIED:
            program = shlex.join(sys.argv) if sys.argv and os.path.isfile(sys.argv[0]) else "PROGRAM.py"
            command = f"opgrad compile --for {self.name} --run {shlex.quote(program)} -o {shlex.quote(self.pack.path)}"
            advice += f"; or, where Numba is installed, `{command}` adds those of the program"
        return LackingError(f"{self.pack.path} has no kernel {kernel} for {self.name}; {advice}")


class Packing(ObjectCache):
    """The cache where code is compiled for a pack: a second folder gets all code that is read or written."""

    def __init__(self, environment: str, directory: str | None, packed: ObjectCache):
        super().__init__(environment, directory)
        self._packed = packed

    def read(self, name: str, suffix: str = SUFFIX) -> bytes | None:
        code = super().read(name, suffix)
        if code is not None and suffix == SUFFIX:
            self._packed.write(name, code)
        return code

    def write(self, name: str, code: bytes, suffix: str = SUFFIX) -> None:
        super().write(name, code, suffix)
        if suffix == SUFFIX:
            self._packed.write(name, code)


class Served(NamedTuple):
    """The pack that serves kernels, and the processor whose kernels are used."""

    pack: Pack
    processor: str


def is_compiler_installed() -> bool:
    return find_spec("numba") is not None


@functools.cache
def served() -> Served | None:
    """The pack that OPGRAD_KERNELS names, else the one that a wheel carries.

    None if there is none, or "" is named, or a wheel's pack is not for the processor here, and Numba is installed.
    """
    named = os.environ.get(VARIABLE)
    if named == "" or (named is None and not os.path.exists(CARRIED)):
        return None
    pack = Pack(CARRIED if named is None else os.path.join(os.getcwd(), named), trusted=named is None)
    try:
        return Served(pack, pack.processor(os.environ.get("NUMBA_CPU_NAME")))
    except PackError:
        if named is None and is_compiler_installed():
            return None
        raise

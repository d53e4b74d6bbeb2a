"""Fuzz what reads files of others, and native calls: python tools/fuzz [--seconds N] [NAME …]

Each target runs in a process of its own for so many seconds, under atheris, which keeps inputs that reach new branches
in build/fuzz/NAME. An input that is a find lies there as crash-…, oom-… or timeout-…, and the exit status is 1; once it
is repaired, it belongs into tests/data/fuzz/NAME. `make fuzz SECONDS=60` sets up what is needed.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from pkgutil import walk_packages
from types import FunctionType

import calls
from readers import READERS, REFUSED, ROOT, Target

CORPUS = ROOT / "build" / "fuzz"
KNOWN = ROOT / "tests" / "data" / "fuzz"  # what was found
TARGETS = {**READERS, "calls": Target(calls.call, calls.seeds)}
LIMITS = ("-rss_limit_mb=3000", "-timeout=30", "-max_len=8192", "-len_control=20", "-verbosity=0")
INSTRUMENTED = (
    "opgrad.onnx.graph",
    "opgrad.gradients",
    "opgrad.onnx.rules",
    "opgrad.training",
    "opgrad.contract",
    "opgrad.cpu.compiler.target",
    "opgrad.cpu.compiler.cache",
    "opgrad.call.arrays",
    "tomllib",
    "zipfile",
)
# Numba compiles kernels in these from their bytecode, which the fuzzer must not change: they are imported before.
COMPILED = ("opgrad.cpu", "opgrad.call", "opgrad.onnxruntime")


def attempt(target: Target, data: bytes) -> None:
    """Give bytes to a target; what it documents for bad ones is no find."""
    with suppress(REFUSED):
        target.read(data)


def imported_functions() -> Iterator[FunctionType]:
    """The functions and methods of instrumented modules that are imported already."""
    for name, module in list(sys.modules.items()):
        if name.startswith(INSTRUMENTED):
            for holder in (module, *filter(isclass, vars(module).values())):
                functions = (getattr(each, "__func__", each) for each in vars(holder).values())
                yield from (each for each in functions if isfunction(each) and each.__module__ == name)


def fuzz(name: str, seconds: int) -> None:
    """Fuzz a target in this process, and end it."""
    import atheris

    for package in map(import_module, COMPILED):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    for function in set(imported_functions()):
        atheris.instrument_func(function)
    with atheris.instrument_imports(list(INSTRUMENTED), enable_loader_override=False):
        target, folder = TARGETS[name], CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        inputs = [*target.seeds(), *(path.read_bytes() for path in (KNOWN / name).glob("*"))]
        for number, content in enumerate(inputs):
            (folder / f"seed-{number}").write_bytes(content)
            attempt(target, content)  # imports everything, instrumented
    words = folder.with_suffix(".words")
    lines = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
    words.write_text("".join(f'"{line}"\n' for line in lines), encoding="utf-8")
    chosen = [f"-dict={words}"] if target.words else []
    options = [*chosen, f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", *LIMITS]
    atheris.Setup([name, *options, str(folder)], lambda data: attempt(target, data))
    atheris.Fuzz()


def main() -> None:
    """Fuzz each target in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--here", action="store_true", help="one target, in this process")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of " + ", ".join(TARGETS))
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in TARGETS]
    if unknown:
        parser.error(f"unknown target {unknown[0]}, expected one of {', '.join(TARGETS)}")
    if given.here:
        fuzz(given.names[0], given.seconds)
    failed = []
    for name in given.names or TARGETS:
        print(f"--- {name}", flush=True)
        command = [sys.executable, str(Path(__file__).parent), "--here", "--seconds", str(given.seconds), name]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    sys.exit(f"fuzz: found something in {', '.join(failed)}: see {CORPUS}" if failed else 0)


if __name__ == "__main__":
    main()

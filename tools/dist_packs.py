"""Build wheels that carry a pack of kernels and need no compiler: python tools/dist_packs.py [--install] [WORD …]

The words are those of `opgrad compile` that say which kernels: artifact sets, --ops, --dtypes, --run; without any,
those of all operators' plain calls. There is a wheel for each architecture, for this version of Python, in dist/packs.
Its version has the suffix +kernels, and Numba is what its extra `compile` brings. --install: the wheel for this
architecture goes into an environment with NumPy and ml_dtypes alone, and the examples of the operators that it has run
there; where artifact sets are named, onnx and onnxruntime join it, and the sets are trained.
"""

import base64
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist" / "packs"
FOR = {"x86_64": "x86-64-v3,x86-64-v4", "aarch64": "aarch64"}
SUFFIX = "+kernels"
PACK = "opgrad/kernels.pack"
COMPILER = "numba"  # the dependency that becomes an extra


def main(*words: str) -> None:
    """Build the wheels, and install one where it is asked for."""
    install = "--install" in words
    chosen = [each for each in words if each != "--install"]
    DIST.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        (plain,) = Path(folder).glob("*.whl")
        for architecture, processors in FOR.items():
            pack = Path(folder) / f"{architecture}.pack"
            run(sys.executable, "-m", "opgrad", "compile", "--for", processors, *chosen, "-o", pack)
            made = carrying(plain, pack.read_bytes(), architecture, DIST)
            print(f"{made.name}: {made.stat().st_size:,} bytes")
            if install and architecture == platform.machine():
                use(made, [(ROOT / each).resolve() for each in chosen if (ROOT / each).is_dir()], _operators(chosen))


def carrying(plain: Path, pack: bytes, architecture: str, folder: Path) -> Path:
    """A wheel like a plain one that carries a pack, for this version of Python and Linux on an architecture."""
    name, version, *_ = plain.stem.split("-")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-none-manylinux_2_17_{architecture}"
    old, new = f"{name}-{version}.dist-info", f"{name}-{version}{SUFFIX}.dist-info"
    made = folder / f"{name}-{version}{SUFFIX}-{tag}.whl"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        records = []
        for path, data in (*_changed(source, old, new, version, tag), (PACK, pack)):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            records.append(f"{path},sha256={digest},{len(data)}")
            target.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
        record = f"{new}/RECORD"
        target.writestr(zipfile.ZipInfo(record, (2020, 1, 1, 0, 0, 0)), "\n".join([*records, f"{record},,", ""]))
    return made


def _changed(source: zipfile.ZipFile, old: str, new: str, version: str, tag: str) -> Iterator[tuple[str, bytes]]:
    """The files of a wheel but its record, with what the new wheel says of itself."""
    for path in source.namelist():
        data, own = source.read(path), path.removeprefix(f"{old}/")
        if own == "METADATA":
            head, _, rest = data.decode().partition("\n\n")
            head = head.replace(f"\nVersion: {version}\n", f"\nVersion: {version}{SUFFIX}\n")
            lines = [f"{line}; extra == 'compile'" if _is_compiler(line) else line for line in head.split("\n")]
            data = "\n".join([*lines, "Provides-Extra: compile", "", rest]).encode()
        elif own == "WHEEL":
            lines = ["Tag: " + tag if line.startswith("Tag: ") else line for line in data.decode().split("\n")]
            data = "\n".join(lines).replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
        if own != "RECORD":
            yield (path if own == path else f"{new}/{own}"), data


def _is_compiler(line: str) -> bool:
    return line.startswith(f"Requires-Dist: {COMPILER}")


def _operators(words: Sequence[str]) -> list[str]:
    """The operators that `opgrad compile` is told to take."""
    return [name.strip() for option, names in pairwise(words) if option == "--ops" for name in names.split(",")]


def use(wheel: Path, sets: Sequence[Path], operators: Sequence[str]) -> None:
    """Install a wheel without its dependencies, train artifact sets, and call operators: without any word, all."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        inside = Path(folder) / "bin" / "python"
        pip = inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"
        run(*pip, "--no-deps", wheel)
        run(*pip, "numpy", "ml_dtypes", *(("onnx", "onnxruntime") if sets else ()))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        program = (ROOT / "tools" / "packed.py", *sets, *operators)
        subprocess.run([inside, *program], cwd=folder, env=environment, check=True)
        size = sum(path.stat().st_size for path in Path(folder).glob("lib/*/site-packages/**/*") if path.is_file())
    print(f"{wheel.name}: installed and used; all packages have {size / 1e6:.0f} MB")


def run(*words: object) -> None:
    subprocess.run(list(map(str, words)), cwd=ROOT, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

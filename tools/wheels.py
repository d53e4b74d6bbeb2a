"""Build sdist and wheels and check them: python tools/wheels.py [--install PYTHON …] [--kernels WORD …] [--plain].

A plain wheel is for any machine and brings Numba. Those for Linux on x86-64 and arm64 carry a pack of kernels for the
Python that runs this, and leave Numba to the extra `compiler`: no compiler stands before a first call. Sdist and plain
wheel are built twice and must be the same bytes, the wheel hold little but code, and the description be one that
renders. The wheel that carries a pack for this machine goes into a bare environment, where the example of every
operator must run without a compiler.

--install: the plain wheel goes into a bare environment of these Pythons, where the NumPy snippets of README and
tutorial and the command line must run. --plain: no wheel carries a pack. --kernels: packs with what these words of
`opgrad compile` name, artifact sets, --ops, --dtypes or --run, in place of all operators' plain calls; the wheels get
the local version +kernels; artifact sets are trained in the bare environment.
"""

import argparse
import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST_DATA = 100_000  # bytes of a wheel that are no code: scanned digits have 45,000, what describes the wheel 37,000
PROCESSORS = {"x86_64": "x86-64-v3,x86-64-v4,x86-64-v4-bf16", "aarch64": "aarch64"}
PACK = "opgrad/kernels.pack"
COMPILER = "Requires-Dist: opgrad[compiler]"  # what a wheel leaves out that carries a pack
NO_TIME = (2020, 1, 1, 0, 0, 0)


def main() -> None:
    """Build, check, and install."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--install", nargs="+", default=[], metavar="PYTHON")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--kernels", nargs=argparse.REMAINDER, default=[], metavar="WORD")
    arguments = parser.parse_args()
    first, second = build(), build()
    if first != second:
        sys.exit(f"dist: two builds differ: {first}, {second}")
    (plain,) = DIST.glob("*.whl")
    check_data(plain)
    if not arguments.plain:
        for architecture, processors in PROCESSORS.items():
            carry(plain, architecture, processors, arguments.kernels)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    for path in sorted(DIST.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes, sha256 {digest(path).hex()}")
    for wheel in DIST.glob(f"*_{platform.machine()}.whl"):
        use_packed(wheel, arguments.kernels)
    for python in arguments.install:
        install(python, plain)


def build() -> dict[str, str]:
    """Build into dist; the SHA-256 of each file. The time in the archives is that of the last commit."""
    shutil.rmtree(DIST, ignore_errors=True)
    date = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT, SOURCE_DATE_EPOCH=date.stdout.strip())
    return {path.name: digest(path).hex() for path in DIST.iterdir()}


def digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def check_data(wheel: Path) -> None:
    """End with a message if more is in a wheel than code."""
    with zipfile.ZipFile(wheel) as file:
        data = {each.filename: each.compress_size for each in file.infolist() if not each.filename.endswith(".py")}
    if sum(data.values()) > MOST_DATA:
        largest = max(data, key=lambda name: data[name])
        text = f"has {sum(data.values()):,} bytes that are no code, expected at most {MOST_DATA:,}"
        sys.exit(f"dist: {wheel.name} {text}; the largest file is {largest}, {data[largest]:,} bytes")


# --- wheels that carry a pack ----------------------------------------------------------------------------------------


def carry(plain: Path, architecture: str, processors: str, words: Sequence[str]) -> None:
    """Compile a pack, with the kernels that the words name, and write a wheel that carries it."""
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "pack"
        run(sys.executable, "-m", "opgrad", "compile", "--for", processors, *words, "-o", pack)
        carrying(plain, pack.read_bytes(), architecture, "+kernels" if words else "")


def carrying(plain: Path, pack: bytes, architecture: str, suffix: str) -> Path:
    """Write a wheel beside a plain one that carries a pack, for this Python and Linux on an architecture.

    suffix: of its version. Returns its path.
    """
    name, version, *_ = plain.stem.split("-")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-manylinux_2_17_{architecture}"
    old, new = f"{name}-{version}.dist-info", f"{name}-{version}{suffix}.dist-info"
    made = plain.parent / f"{name}-{version}{suffix}-{tag}.whl"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(made, "w") as target:
        records = []
        for path, data in (*_changed(source, old, new, version + suffix, tag), (PACK, pack)):
            checksum = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            records.append(f"{path},sha256={checksum},{len(data)}")
            target.writestr(zipfile.ZipInfo(path, NO_TIME), data, zipfile.ZIP_DEFLATED)
        record = f"{new}/RECORD"
        target.writestr(zipfile.ZipInfo(record, NO_TIME), "\n".join([*records, f"{record},,", ""]))
    return made


def _changed(source: zipfile.ZipFile, old: str, new: str, version: str, tag: str) -> Iterator[tuple[str, bytes]]:
    """The files of a wheel but its record, with what the new wheel says of itself."""
    for path in source.namelist():
        data, own = source.read(path), path.removeprefix(f"{old}/")
        if own == "METADATA":
            head, _, rest = data.decode().partition("\n\n")
            lines = [line for line in head.split("\n") if line != COMPILER]
            if len(lines) == len(head.split("\n")):
                sys.exit(f"dist: {path} has no line {COMPILER!r}")
            lines = [f"Version: {version}" if line.startswith("Version: ") else line for line in lines]
            data = "\n".join([*lines, "", rest]).encode()
        elif own == "WHEEL":
            lines = ["Tag: " + tag if line.startswith("Tag: ") else line for line in data.decode().split("\n")]
            data = "\n".join(lines).replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
        if own != "RECORD":
            yield (path if own == path else f"{new}/{own}"), data


def use_packed(wheel: Path, words: Sequence[str]) -> None:
    """Install a wheel that carries a pack into a bare environment, train artifact sets, and call operators.

    Without words all operators are called.
    """
    sets = [(ROOT / word).resolve() for word in words if (ROOT / word).is_dir()]
    operators = [name for option, names in pairwise(words) if option == "--ops" for name in names.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        python = environment(sys.executable, folder, f"{wheel}[onnx]" if sets else wheel)
        told = run(python, ROOT / "tools" / "packed.py", *sets, *operators, cwd=folder, PYTHONPATH="")
        size = sum(path.stat().st_size for path in Path(folder).glob("lib/*/site-packages/**/*") if path.is_file())
    print(f"{told}{wheel.name}: installed and used; all packages have {size / 1e6:.0f} MB")


# --- environments ----------------------------------------------------------------------------------------------------


def snippets(document: str) -> list[str]:
    """The Python code of a document. README's first and the NumPy tutorial's need no extras."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.M | re.S)


def environment(python: str, folder: str, wheel: object) -> Path:
    """Install a wheel into a bare environment in a folder; the environment's Python."""
    run(python, "-m", "venv", folder)
    inside = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    return inside


def install(python: str, wheel: Path) -> None:
    """Install the wheel into a bare environment, away from the sources, and use it."""
    first, *_ = snippets("README.md")
    code = "\n".join([first, *snippets("docs/start/numpy.md")])
    with tempfile.TemporaryDirectory() as folder:
        inside = environment(python, folder, wheel)
        own = {"OPGRAD_CACHE_DIR": str(Path(folder) / "cache"), "PYTHONPATH": ""}
        run(inside, "-W", "error", "-c", code, cwd=folder, **own)
        run(inside, "-m", "opgrad", "ops", cwd=folder, **own)
    print(f"{python}: installed and used")


def run(*words: object, cwd: Path | str = ROOT, **environment: str) -> str:
    """Run a command; what it prints. End with that if it fails."""
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"dist: {' '.join(map(str, words[:4]))} failed:\n{done.stdout or ''}{done.stderr or ''}")
    return done.stdout


if __name__ == "__main__":
    main()

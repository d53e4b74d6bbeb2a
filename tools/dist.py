"""Build wheel and sdist twice and check them: python tools/dist.py [--install PYTHON …].

Both builds must be the same bytes, the wheel hold little but code, and the description be one that renders. With
--install the wheel goes into a bare environment of each Python, where the NumPy snippets of README and tutorial and the
command line must run.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST_DATA = 100_000  # bytes of a wheel that are no code: scanned digits have 45,000, what describes the wheel 37,000


def main() -> None:
    """Build, check, and install where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--install", nargs="+", default=[], metavar="PYTHON")
    pythons = parser.parse_args().install
    first, second = build(), build()
    if first != second:
        sys.exit(f"dist: two builds differ: {first}, {second}")
    (wheel,) = DIST.glob("*.whl")
    check_data(wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    for path in sorted(DIST.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes, sha256 {first[path.name]}")
    for python in pythons:
        install(python, wheel)


def build() -> dict[str, str]:
    """Build into dist; the SHA-256 of each file. The time in the archives is that of the last commit."""
    shutil.rmtree(DIST, ignore_errors=True)
    date = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT, SOURCE_DATE_EPOCH=date.stdout.strip())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in DIST.iterdir()}


def check_data(wheel: Path) -> None:
    """End with a message if more is in a wheel than code."""
    with zipfile.ZipFile(wheel) as file:
        data = {each.filename: each.compress_size for each in file.infolist() if not each.filename.endswith(".py")}
    if sum(data.values()) > MOST_DATA:
        largest = max(data, key=lambda name: data[name])
        text = f"has {sum(data.values()):,} bytes that are no code, expected at most {MOST_DATA:,}"
        sys.exit(f"dist: {wheel.name} {text}; the largest file is {largest}, {data[largest]:,} bytes")


def snippets(document: str) -> list[str]:
    """The Python code of a document. README's first and the NumPy tutorial's need no extras."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.M | re.S)


def install(python: str, wheel: Path) -> None:
    """Install the wheel into a bare environment, away from the sources, and use it."""
    first, *_ = snippets("README.md")
    code = "\n".join([first, *snippets("docs/start/numpy.md")])
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        inside = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
        run(inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        own = {"OPGRAD_CACHE_DIR": str(Path(folder) / "cache"), "PYTHONPATH": ""}
        run(inside, "-W", "error", "-c", code, cwd=folder, **own)
        run(inside, "-m", "opgrad", "ops", cwd=folder, **own)
    print(f"{python}: installed and used")


def run(*words: object, cwd: Path | str = ROOT, **environment: str) -> None:
    """Run a command; end with what it says if it fails."""
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"dist: {' '.join(map(str, words[:4]))} failed:\n{done.stdout or ''}{done.stderr or ''}")


if __name__ == "__main__":
    main()

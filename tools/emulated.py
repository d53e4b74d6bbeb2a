"""Make a Python that runs as on another processor, by qemu's emulation of single programs, and print its path.

    python tools/emulated.py arm64 .emulated     # Debian's Python for arm64, with wheels of what the tests need
    python tools/emulated.py Haswell .emulated   # the Python that runs this, on an x86-64 without AVX-512
    python tools/emulated.py Nehalem .emulated   # and without AVX

Needs Debian's qemu-user; for arm64 debootstrap, root, and the network too. What was fetched is kept. The Python is a
script that names itself in sys.executable, so that processes which tests start are emulated as well.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

RELEASE, MIRROR = "bookworm", "http://deb.debian.org/debian"  # its Python is 3.11
PACKAGES = "python3,libgomp1"
MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux2014")
EXTRAS = ("compiler", "test")


def main(processor: str, folder: str) -> None:
    made = Path(folder).resolve() / processor
    made.mkdir(parents=True, exist_ok=True)
    if processor == "arm64":
        fetch(made)
        found = f"${{PYTHONPATH:+$PYTHONPATH:}}{made}/packages:{Path('src').resolve()}"
        line = f"export PYTHONHOME={made}/system/usr PYTHONPATH={found}"
        program = f"qemu-aarch64 -L {made}/system -0 $0 {made}/system/usr/bin/python3.11"
        python = made / "python"
    else:
        # OpenBLAS, to find out what an old processor is, takes an instruction that it lacks.
        line = "export OPENBLAS_CORETYPE=Nehalem" if processor == "Nehalem" else ""
        program = f"qemu-x86_64 -cpu {processor} -0 $0 {Path(sys.executable).resolve()}"
        python = Path(sys.executable).with_name(f"python-{processor}")  # beside it, to find the same packages
    python.write_text(f'#!/bin/sh\n{line}\nexec {program} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    print(python)


def fetch(made: Path) -> None:
    """Debian's Python for arm64 and the wheels of opgrad's dependencies, unpacked into a folder."""
    system, packages = made / "system", made / "packages"
    if packages.exists():
        return
    first_stage = ["debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", f"--include={PACKAGES}"]
    run(*first_stage, RELEASE, system, MIRROR)
    for package in sorted(system.glob("var/cache/apt/archives/*.deb")):  # the first stage unpacks but a few
        run("dpkg-deb", "--extract", package, system)
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = project["dependencies"] + [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    wanted = [each for each in stated if not each.startswith(project["name"])]
    platforms = [option for each in MANYLINUX for option in ("--platform", f"{each}_aarch64")]
    target = [*platforms, "--python-version", "3.11", "--only-binary=:all:", "--target", packages]
    run(sys.executable, "-m", "pip", "install", "--quiet", *target, *wanted)


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])

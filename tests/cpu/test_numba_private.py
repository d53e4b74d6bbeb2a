"""The names of Numba that it does not document, which all releases of the requirements have."""

import re
import tomllib
from pathlib import Path

import numba
from numba.core.compiler import DefaultPassBuilder
from subprocesses import run_python

import opgrad
from opgrad.base.locks import compilers_locks
from opgrad.cpu.compiler.lowering.build import SHORTCUTS, UNNEEDED

SOURCE = Path(opgrad.__file__).parent


def test_this_release_has_every_name():
    assert all(hasattr(owner, name) for owner, name, _ in SHORTCUTS)
    assert all(lock is not None for lock in compilers_locks())
    everything = DefaultPassBuilder.define_nopython_pipeline(_State()).passes
    assert {*UNNEEDED} <= {each[0].__name__ for each in everything}


class _State:
    """What a pipeline of passes is made for."""

    func_ir = None

    class flags:
        no_rewrites, enable_ssa, auto_parallel = True, True, type("", (), {"enabled": False})


def test_the_requirements_name_this_release():
    """The ceiling is the next minor release, which nobody has tried."""
    project = SOURCE.parents[1] / "pyproject.toml"
    stated = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (bounds,) = (re.fullmatch(r"numba>=([\d.]+),<([\d.]+)", each) for each in stated["compiler"])
    lowest, ceiling, own = (
        tuple(map(int, re.findall(r"\d+", each)[:2])) for each in (*bounds.groups(), numba.__version__)
    )
    assert lowest <= own < ceiling
    assert own <= (ceiling[0], ceiling[1] - 1) or ceiling[1] == 0


WITHOUT = """
import numba.core.ir
del numba.core.ir.Var
import numpy as np
import opgrad
try:
    opgrad.relu(np.zeros(3, np.float32))
except ImportError as error:
    print(error)
"""


def test_without_a_name(tmp_path):
    """The import works, and the first kernel that has to be compiled says what is missing."""
    tmp_path.chmod(0o700)
    said = run_python(WITHOUT, OPGRAD_CACHE_DIR=str(tmp_path))
    assert said.startswith(f"opgrad: no kernel can be compiled with Numba {numba.__version__}: cannot import name 'Var")

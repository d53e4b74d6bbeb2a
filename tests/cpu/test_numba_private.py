"""The names of Numba that it does not document: this release has all of them; one without some compiles, slowly."""

import re
import shutil
import tomllib
import warnings
from pathlib import Path

import numba
import pytest
from subprocesses import run_python

import opgrad
from opgrad.base.locks import compilers_locks
from opgrad.cpu.compiler.lowering import numba_private
from opgrad.cpu.compiler.lowering.build import SHORTCUTS

pytestmark = pytest.mark.any_cpu

SOURCE = Path(opgrad.__file__).parent
HERE = Path(numba_private.__file__).relative_to(SOURCE)
COMPILE = """
import warnings
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import opgrad
    x = np.linspace(-3, 3, 501, dtype=np.float32)
    y = opgrad.relu(x)
    assert (y == np.maximum(x, 0)).all()
print(opgrad.__file__)
for each in caught:
    print(each.message)
"""


def test_this_release_has_every_name():
    assert numba_private.MISSING == []
    assert all(lock is not None for _, lock in compilers_locks())
    everything = numba_private.DefaultPassBuilder.define_nopython_pipeline(_State()).passes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numba_private.without_unneeded(everything)
    assert len(SHORTCUTS) == 6


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


def copied(tmp_path, change):
    """Run COMPILE with a copy of the package in which this file was changed."""
    package = tmp_path / "opgrad"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / HERE
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    tmp_path.chmod(0o700)
    return {"PYTHONPATH": str(tmp_path), "OPGRAD_CACHE_DIR": str(tmp_path / "cache"), "OPGRAD_NUM_THREADS": "1"}


def test_without_the_names_that_save_time(tmp_path):
    """With all of them gone, kernels are compiled by Numba's own ways, and one warning names them."""
    gone = re.compile(r'_found\(\s*"([^"]+)"')
    paths = gone.findall((SOURCE / HERE).read_text(encoding="utf-8"))
    assert len(paths) >= 12
    environment = copied(tmp_path, lambda text: gone.sub(lambda found: found[0][:-1] + '_gone"', text))
    where, warning = run_python(COMPILE, **environment).splitlines()
    assert where.startswith(str(tmp_path))
    assert warning.startswith(f"opgrad: Numba {numba.__version__} with llvmlite ")
    assert warning.endswith(": kernels compile more slowly")
    for path in paths:
        assert f"{path.replace(':', '.')}_gone" in warning


def test_without_a_name_that_is_needed(tmp_path):
    """The import works, and the first kernel that has to be compiled says what is missing."""
    change = COMPILE.replace(
        "    y = opgrad.relu(x)\n",
        "    try:\n        opgrad.relu(x)\n    except ImportError as error:\n        y = error\n",
    )
    change = change.replace("    assert (y == np.maximum(x, 0)).all()\n", "").replace(
        "print(opgrad.__file__)", "print(y)"
    )
    environment = copied(tmp_path, lambda text: text.replace("templates:signature", "templates:signature_gone"))
    assert run_python(change, **environment).startswith(
        f"opgrad: Numba {numba.__version__} lacks numba.core.typing.templates.signature_gone, without which no kernel"
    )

"""The types that a type checker sees in another project, where opgrad is an installed package."""

import inspect
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import opgrad
from opgrad.ops import graph_operators, operators

PACKAGE = Path(opgrad.__file__).parent
USE = """
import numpy as np
import opgrad

x = np.ones((2, 3))
{revealed}
reveal_type(opgrad.relu(x))
reveal_type(opgrad.softmax_cross_entropy_loss(x, np.zeros(2, int)))
opgrad.softmax(x, axis="last")
opgrad.relu(x, slope=3)
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of a file that uses opgrad, in a project with an environment of its own."""
    project = tmp_path_factory.mktemp("project")
    names = [*operators(), *graph_operators(), "get_num_threads"]
    (project / "use.py").write_text(USE.format(revealed="\n".join(f"reveal_type(opgrad.{name})" for name in names)))
    venv.create(project / "env", symlinks=os.name != "nt")
    paths = {"base": str(project / "env"), "platbase": str(project / "env")}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    (site / "installed.pth").write_text(f"{PACKAGE.parent}\n{sysconfig.get_path('purelib')}\n")
    scripts = Path(sysconfig.get_path("scripts", "venv", paths))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(project / "cache"), "use.py"]
    command += ["--python-executable", str(scripts / "python")]
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.stdout


def test_the_package_says_that_it_has_types() -> None:
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_operators_keep_their_signatures(checked: str) -> None:
    """The decorator that declares an operator hides none of it: every parameter is there, by its name."""
    for name, op in {**operators(), **graph_operators()}.items():
        revealed = next(line for line in checked.splitlines() if re.search(r'"def .*"', line))
        checked = checked.partition(revealed)[2]
        parameters = re.findall(r"[(,*] ?\*?(\w+): ", re.sub(r"\[[^()]*?\]", "", revealed))
        assert parameters == list(inspect.signature(op.reference).parameters), name
    assert 'Revealed type is "def () -> int"' in checked


def test_arguments_and_results_are_checked(checked: str) -> None:
    array = r"numpy\.ndarray\[tuple\[Any, \.\.\.\], numpy\.dtype\[Any\]\]"
    assert re.search(rf'Revealed type is "{array}"', checked)
    assert re.search(rf'Revealed type is "tuple\[{array}, {array}\]"', checked)
    assert 'Argument "axis" to "softmax" has incompatible type "str"; expected "int | tuple[int, ...]"' in checked
    assert 'Unexpected keyword argument "slope" for "relu"' in checked
    assert "Found 2 errors in 1 file" in checked

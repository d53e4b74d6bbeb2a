"""Which tests run: one that is skipped for want of a package fails where all packages are said to be installed; of the
cases of one with several parameters a run takes each level."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="onnxruntime-genai is not installed")
def test_marked(): pass

@pytest.mark.skipif(True, reason="needs a GPU")
def test_of_something_else(): pass

def test_imported(): pytest.importorskip("a_package_that_nobody_has")

def test_without(): pass
"""


@pytest.mark.any_cpu
@pytest.mark.parametrize(("said", "found"), [("", {"skipped": 4}), ("1", {"failed": 1, "errors": 2, "skipped": 1})])
def test_skips_for_want_of_a_package(pytester, monkeypatch, said, found):
    monkeypatch.setenv("OPGRAD_INTEGRATIONS", said)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    whole = "import pytest; pytest.importorskip('a_package_that_nobody_has')"
    pytester.makepyfile(test_single=TESTS, test_whole=whole)
    options = "-p", "no:xdist", "--continue-on-collection-errors"
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=1, **found)


PARAMETERS = """
import pytest

@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(5))
def test_product(a, b): pass

@pytest.mark.every_case
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(5))
def test_whole(a, b): pass

@pytest.mark.one_case
@pytest.mark.parametrize("a", range(5))
def test_one(a): pass

@pytest.mark.few_cases(2)
@pytest.mark.parametrize("a", range(5))
def test_few(a): pass

@pytest.mark.one_in(2)
@pytest.mark.parametrize("a", range(5))
def test_half(a): pass

@pytest.mark.parametrize(("a", "b"), [(0, 1), (0, 2), (1, 1), (1, 2)])
def test_listed(a, b): pass

@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", range(30))
def test_typed(op, dtype): pass
"""


@pytest.mark.any_cpu
def test_every_level_is_taken_in_other_combinations_each_turn(pytester, monkeypatch):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(PARAMETERS)
    pytester.makeini("[pytest]\nmarkers =\n  every_case\n  one_case\n  few_cases\n  one_in")
    runs = []
    for cases_of, turn in (("all", "1"), ("levels", "1"), ("levels", "1"), ("levels", "2")):
        monkeypatch.setenv("OPGRAD_CASES", cases_of)
        monkeypatch.setenv("OPGRAD_TURN", turn)
        passed, *_ = pytester.inline_run("-p", "no:xdist").listoutcomes()
        cases = [each.nodeid.partition("::")[2] for each in passed]
        counts = [
            sum(case.startswith(test) for case in cases)
            for test in ("test_whole", "test_one", "test_few", "test_half", "test_listed")
        ]
        assert counts == [15, *((5, 5, 5) if cases_of == "all" else (1, 2, 3)), 4]
        dtypes = [case[:-1].rpartition("-")[2] for case in cases if case.startswith("test_typed")]
        assert set(dtypes) == {"float16", "float32", "float64"}
        assert len(dtypes) == 90 or (len(dtypes) == 30 and 15 < dtypes.count("float32") < 28)
        runs.append({tuple(case[13:-1].split("-")) for case in cases if case.startswith("test_product")})
    assert len(runs[0]) == 15
    for found in runs[1:]:
        assert len(found) < 8
        assert [set(each) for each in zip(*found, strict=True)] == [set(each) for each in zip(*runs[0], strict=True)]
    assert runs[1] == runs[2] != runs[3]


TESTED = Path(__file__).parent
# Modules of the package by which tests are skipped, and names under which packages are installed.
WANTED = re.compile(r"(?:importorskip|find_spec)\(\"(\w+)")
NAMES = {"sklearn": "scikit-learn", "jaxlib": "jax", "onnxruntime_genai": "onnxruntime-genai", "onnx_ir": "onnx-ir"}
OWN = {"a_package_that_nobody_has", "architectures", "bench", "opgrad", "cupy"}  # cupy needs a GPU


def _packages(extra):
    """The packages that an extra installs, and those of the package itself."""
    project = tomllib.loads((TESTED.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, waiting = {"torch"}, [*project["dependencies"], f"opgrad[{extra}]"]  # torch by tools/install_torch.py
    for each in waiting:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", each).groups()
        if name == "opgrad":
            waiting += [other for one in extras.split(",") for other in project["optional-dependencies"][one]]
        found.add(name)
    return found


def _wanted():
    """For each module for want of which tests are skipped, their files."""
    found = {}
    for path in TESTED.rglob("*.py"):
        for name in set(WANTED.findall(path.read_text(encoding="utf-8"))) - OWN - sys.stdlib_module_names:
            found.setdefault(NAMES.get(name, name), set()).add(path.relative_to(TESTED.parent).as_posix())
    return found


@pytest.mark.any_cpu
def test_each_package_that_tests_need_is_in_an_environment_that_runs_them():
    makefile = (TESTED.parent / "Makefile").read_text(encoding="utf-8")
    integrations = re.search(r"INTEGRATION_TESTS := ((?:.*\\\n)*.*)", makefile)[1]
    missing = _wanted().keys() - _packages("dev")
    assert missing
    assert missing <= _packages("integrations")
    assert "tests/portable/test_flower.py" in integrations  # whose package has an environment of its own
    assert [path for name in missing for path in _wanted()[name] if path not in integrations] == []

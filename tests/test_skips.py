"""A test that is skipped for want of a package fails where all packages are said to be installed."""

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
@pytest.mark.parametrize(("said", "found"), [("", {"skipped": 3}), ("1", {"failed": 1, "errors": 1, "skipped": 1})])
def test_skips_for_want_of_a_package(pytester, monkeypatch, said, found):
    monkeypatch.setenv("OPGRAD_INTEGRATIONS", said)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(TESTS)
    pytester.runpytest_inprocess("-p", "no:xdist").assert_outcomes(passed=1, **found)


@pytest.mark.any_cpu
@pytest.mark.parametrize(("said", "errors"), [("", 0), ("1", 1)])
def test_files_that_are_skipped(pytester, monkeypatch, said, errors):
    monkeypatch.setenv("OPGRAD_INTEGRATIONS", said)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile("import pytest; pytest.importorskip('a_package_that_nobody_has')")
    pytester.runpytest_inprocess("-p", "no:xdist").assert_outcomes(errors=errors, skipped=1 - errors)

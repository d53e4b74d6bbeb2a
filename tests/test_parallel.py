"""Tests that run in several processes end, and name the test in which one of these has died or waits for ever."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
MAKEFILE = Path(__file__).parents[1] / "Makefile"
OPTIONS = re.compile(r"^PARALLEL := ((?:.*\\\n)*.*)", re.MULTILINE)
ENDINGS = {
    "dies": "os.abort()",
    "waits": pytest.param("time.sleep(600)", marks=pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 8")),
}


@pytest.mark.any_cpu
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_process_that_does_not_end_its_test(pytester, ending):
    options = OPTIONS.search(MAKEFILE.read_text(encoding="utf-8"))[1].replace("\\\n", "")
    assert "faulthandler_timeout=900" in options
    pytester.makepyfile(
        test_first="def test_passes(): pass\ndef test_passes_too(): pass",
        test_second=f"import os, time\ndef test_ends(): {ending}\ndef test_after(): pass",
    )
    options = options.replace("=900", "=3").replace("--numprocesses auto", "--numprocesses 1").split()
    done = pytester.runpytest_subprocess(*options, "--dist", "loadfile", timeout=600)
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["worker 'gw0' crashed while running 'test_second.py::test_ends'"])
    assert "test_second.py" in done.stderr.str(), "the traceback"

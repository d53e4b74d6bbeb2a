"""`python -m bench` within the process of a test."""

import io
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

from bench.__main__ import main


def run_bench(*words):
    """The exit status of a command line, and all that it printed."""
    printed = io.StringIO()
    code = 0
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            main([str(word) for word in words])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            printed.write("" if isinstance(error.code, int) else str(error.code))
    return SimpleNamespace(exit_code=code, output=printed.getvalue(), stderr=printed.getvalue())

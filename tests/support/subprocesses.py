"""Code in fresh interpreters."""

import os
import subprocess
import sys

TIMEOUT = 120  # seconds, for a subprocess that may hang


def run_python(code, **environment):
    """The output of a fresh interpreter; it shares the suite's kernel cache."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

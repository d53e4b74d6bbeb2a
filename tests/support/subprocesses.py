"""Code in fresh interpreters."""

import os
import subprocess
import sys

WAITING = ("OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")  # what conftest.py sets
TIMEOUT = 600  # seconds, for a subprocess that hangs: a busy machine takes minutes for what takes one second else


def run_python(code, *words, without=WAITING, **environment):
    """The output of a fresh interpreter; it shares the suite's kernel cache. Its threads wait as users' threads do."""
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

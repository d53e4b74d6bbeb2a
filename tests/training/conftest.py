"""Runs of training without what takes most of the time of small ones."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def short_runs():
    """All threads are taken, without a trial of one alone, and no picture is drawn: tests/test_cli.py does both."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("matplotlib"):  # without which nothing is run
            from opgrad.base.files import replace_file
            from opgrad.training.run import job

            patch.setattr(job, "LONG_STEP", 0.0)
            patch.setattr(job, "plot_losses", lambda *given: replace_file(Path(given[-1]), b"\x89PNG"))
        yield

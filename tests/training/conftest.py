"""Runs of training without what takes most of the time of small ones."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """All threads are taken, without a trial of one alone, and pictures are small: tests/test_cli.py has neither."""
    if importlib.util.find_spec("matplotlib"):  # without which nothing is run
        from matplotlib.figure import Figure

        from opgrad.training.run import job, metrics

        monkeypatch.setattr(job, "LONG_STEP", 0.0)
        monkeypatch.setattr(metrics, "Figure", lambda **_: Figure(dpi=30))

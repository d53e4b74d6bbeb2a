"""`python -m bench --device cuda --predict`: predictions alone without a device, beside what was measured with one."""

import io

import pytest
from bench_command import run_bench
from rich.console import Console

from bench.cuda import predictions
from opgrad.cli import machine

WIDE = {"COLUMNS": "200"}


def printed(result):
    screen = Console(file=io.StringIO(), width=200)
    predictions.show_beside(screen, result)
    return screen.file.getvalue()


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(machine, "cuda_problem", lambda: "there is none")
    done = run_bench("--device", "cuda", "--predict", "--ops", "softmax_grad")
    assert done.exit_code == 0, done.output
    assert "softmax_grad" in done.output
    assert "Nothing is measured: there is none." in done.output


def test_beside_what_was_measured():
    name, own = next((name, own) for name, own in predictions.predictions().items() if "H200" in own)
    operator, shape, dtype = predictions._parts(name)
    times = {"opgrad": {"median": 2 * own["H200"]["seconds"]}}
    cell = {"operator": operator, "workload": shape, "dtype": dtype, "ways": {"new": {"times": times}}}
    cell["regime"] = own["H200"]["regime"]
    result = {"device": {"name": "NVIDIA H200"}, "cells": [cell, cell | {"dtype": "float63"}]}
    lines = [line for line in printed(result).splitlines() if operator in line]
    assert len(lines) == 1
    assert "2.00" in lines[0]
    assert own["H200"]["regime"] in lines[0]
    assert "No prediction for A card" in printed(result | {"device": {"name": "A card"}})
    (line,) = [
        line for line in printed(result | {"cells": [cell | {"regime": "another"}]}).splitlines() if operator in line
    ]
    assert "another" in line
    assert f"for {own['H200']['regime']}" in line
    assert "2.00" not in line


def test_every_prediction_is_of_a_cell():
    """Memory moves no more than 5 % above the fewest bytes, in any regime; no share is above what memory reaches."""
    for name, own in predictions.predictions().items():
        for gpu, said in own.items():
            assert gpu in predictions.GPUS
            assert said["seconds"] > 0
            assert 0 < said["share"] < 0.94, (name, gpu)
            assert 0.9 < said["traffic"] < 1.05, (name, gpu)


@pytest.mark.parametrize("options", [["--predict"], ["--load", "--predict"]])
def test_where_there_are_none(options):
    done = run_bench(*options)
    assert done.exit_code == 1
    assert "--predict" in done.output

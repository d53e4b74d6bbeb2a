"""Pythons without the interpreter's lock, as far as another can stand in: no native calls, threads that switch."""

import json
from pathlib import Path

import callers
import pytest
from subprocesses import run_python

PRETEND = f"""
import sys, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
sys._is_gil_enabled = lambda: False
import json, types
import numpy as np
sys.path.insert(0, {str(Path(callers.__file__).parent)!r})
from callers import call_at_once
sys.setswitchinterval(1e-5)  # threads stop wherever they are
"""
NUMPY = """
import opgrad
from opgrad.call import arrays, entries; from opgrad.cpu import plans
arrays.RUNNERS = plans.PLANS.most = 8  # plans are replaced all the time
xs = [np.random.default_rng(n).normal(size=(3, n)).astype("float32") for n in range(1, 40)]
relu, soft = [np.maximum(x, 0) for x in xs], [np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in xs]
large = np.random.default_rng(0).normal(size=(64, 3000)).astype("float32")
plan = opgrad.plan(opgrad.softmax, large, out=np.empty_like(large))
expected = plan(large, out=np.empty_like(large))
labels, scores = np.arange(40) % 10, np.zeros((40, 10), np.float32)
loss = opgrad.softmax_cross_entropy_loss(scores, labels)[0]
def calls(number):
    out, row = np.empty_like(large), labels.copy()
    for turn in range(25):
        which = (number + turn * (number + 1)) % len(xs)
        np.testing.assert_array_equal(opgrad.relu(xs[which]), relu[which])
        np.testing.assert_allclose(opgrad.softmax(xs[which]), soft[which], rtol=1e-5)
        np.testing.assert_array_equal(plan(large, out=out), expected)
        np.testing.assert_array_equal(opgrad.softmax(large), expected)
        assert opgrad.softmax_cross_entropy_loss(scores, row)[0] == loss
        row[number] = 99
        try:
            opgrad.softmax_cross_entropy_loss(scores, row)
            raise AssertionError("no error")
        except ValueError as error:
            assert f"labels[{number}] is 99" in str(error), error
        row[number] = labels[number]
calls(0)  # imports and kernels
call_at_once(4, calls)
print(json.dumps([entries.SUPPORTED, type(opgrad.relu) is types.FunctionType]))
"""
TORCH = """
import torch, opgrad.torch
from opgrad.call import entries
from opgrad.call.libraries import torch_calls, torch_tensors
torch.set_num_threads(1)
torch_calls.prepare()
def calls(number):
    for turn in range(20):
        x = torch.randn(3 + number, 1 + turn % 3, requires_grad=True)
        dy = torch.randn_like(x)
        for ours, theirs in ((opgrad.torch.softmax, torch.softmax), (opgrad.torch.log_softmax, torch.log_softmax)):
            y = ours(x, -1)
            assert torch.allclose(y, theirs(x, -1), atol=1e-5)
            (dx,), (expected,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(theirs(x, -1), x, dy)
            assert torch.allclose(dx, expected, atol=1e-5)
        large = torch.ones(1 << 18)
        assert opgrad.torch.relu(large) is not opgrad.torch.relu(large)
calls(0)  # imports and kernels
call_at_once(4, calls)
print(json.dumps([bool(entries.tensors.address), torch_tensors._references is not None]))
"""


def test_public_functions_are_python_and_right():
    supported, is_function = json.loads(run_python(PRETEND + NUMPY))
    assert (supported, is_function) == (False, True)


def test_tensors_are_left_to_python():
    pytest.importorskip("torch")
    is_known, pools = json.loads(run_python(PRETEND + TORCH))
    assert (is_known, pools) == (False, False)

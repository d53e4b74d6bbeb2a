"""Attributes in tensors are read at each call, and once: backward passes use what the forward pass read."""

import numpy as np
import pytest

import opgrad

torch = pytest.importorskip("torch")

import opgrad.torch  # noqa: E402

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
LABELS = np.array([0, 1, 3])


def slopes():
    """Numbers of PyTorch's that change, and how."""
    return [torch.nn.Parameter(torch.tensor(0.5)), torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5).double()]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("function", [opgrad.leaky_relu, opgrad.torch.leaky_relu])
def test_tensors_that_change(function, number):
    slope, x = slopes()[number], torch.from_numpy(X.copy())
    for value in (0.5, 0.25, 0.5):
        with torch.no_grad():
            slope.fill_(value)
        assert torch.equal(function(x, slope).detach(), function(x, value))
        np.testing.assert_array_equal(opgrad.leaky_relu(X, slope), opgrad.leaky_relu(X, value))


@pytest.mark.parametrize("number", range(4))
def test_backward_reads_the_numbers_of_forward(number):
    slope = slopes()[number]
    for call in (opgrad.leaky_relu, opgrad.torch.quick_gelu, torch.ops.opgrad.quick_gelu):
        x = torch.from_numpy(X.copy()).requires_grad_()
        expected = torch.autograd.grad(call(x, 0.5).sum(), x)
        with torch.no_grad():
            slope.fill_(0.5)
        y = call(x, slope.detach() if call is torch.ops.opgrad.quick_gelu else slope)
        with torch.no_grad():
            slope.fill_(0.25)
        assert torch.equal(*torch.autograd.grad(y.sum(), x), *expected)


def test_backward_of_general_calls_reads_the_numbers_of_forward():
    x, scale = torch.from_numpy(X.copy()).requires_grad_(), torch.tensor(0.5)
    weights = torch.arange(12.0).view(3, 4)
    expected = torch.autograd.grad((weights * opgrad.softmax(x, logit_scale=0.5)).sum(), x)
    y = opgrad.softmax(x, logit_scale=scale)
    scale.fill_(2)
    assert torch.equal(*torch.autograd.grad((weights * y).sum(), x), *expected)
    assert torch.equal(opgrad.softmax(x, logit_scale=scale), opgrad.softmax(x, logit_scale=2.0))


def test_other_attributes_in_tensors():
    x, labels = torch.from_numpy(X.copy()), torch.from_numpy(LABELS)
    axis, ignored, shape = torch.tensor(0), torch.tensor(3), torch.tensor([4, 4])
    for value in (0, 1):
        axis.fill_(value)
        assert torch.equal(opgrad.softmax(x, axis), opgrad.softmax(x, value))
        assert torch.equal(opgrad.torch.log_softmax(x, dim=(axis,)), opgrad.log_softmax(x, value))
        ignored.fill_(value)
        call = opgrad.torch.cross_entropy
        assert torch.equal(call(x, labels, ignore_index=ignored), call(x, labels, ignore_index=value))
        shape.fill_(4 + value)
        assert opgrad.gather_grad(shape, labels, torch.ones(3, 4 + value)).shape == (4 + value, 4 + value)
    shape.resize_(5)  # it stays PyTorch's
    with pytest.raises(TypeError, match=r"leaky_relu: alpha is tensor\(.*\), expected a number"):
        opgrad.leaky_relu(x, torch.tensor([0.5, 0.25]))

"""Softmax and its gradients in their general form on CUDA: what their tests share."""

import dataclasses
import functools

import pytest
from cuda_backend import ON_GPU, forget, public
from primitive_cases import LAYOUTS, c_order, every_second, fortran, gapped, permuted

import opgrad

NAMES = ("softmax", "log_softmax")
GRADIENTS = ("softmax_grad", "log_softmax_grad")
# Tensors have no negative strides, nor any that are no multiple of an element.
WAYS = [c_order, fortran, permuted, gapped, every_second] if ON_GPU else list(LAYOUTS)
names = pytest.mark.parametrize("name", NAMES)
gradients = pytest.mark.parametrize("name", GRADIENTS)


def call_kernels(monkeypatch):
    """Let the public functions call the CUDA kernels."""
    for name in (*NAMES, *GRADIENTS):
        monkeypatch.setattr(opgrad, name, functools.partial(public, name))


def lower_limits(monkeypatch):
    """A fixture: rows of more than 128 elements are long, of fewer in gradients."""
    from opgrad.cuda import regimes

    monkeypatch.setattr(regimes, "LIMITS", dataclasses.replace(regimes.RegisterLimits(), row=256, tile=32, step=512))
    forget()
    yield
    monkeypatch.undo()
    forget()

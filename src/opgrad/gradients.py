"""Gradients of ONNX models as ONNX graphs; the code is in `opgrad.onnx`."""

from opgrad.onnx.gradients import Node, NoGradient, gradients, register_gradient

__all__ = ["NoGradient", "Node", "gradients", "register_gradient"]

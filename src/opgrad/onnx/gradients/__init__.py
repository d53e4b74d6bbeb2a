"""Gradients of ONNX models as ONNX graphs: one rule for each operator, and the code that builds a graph from them.

Imports `onnx/rules` and below.
"""

try:
    import onnx  # noqa: F401
except ImportError as error:
    missing = "opgrad.gradients: onnx cannot be imported; install it with: pip install 'opgrad[onnx]'"
    raise ImportError(missing) from error

from opgrad.onnx.gradients.differentiation import gradients
from opgrad.onnx.rules.node import Node, NoGradient, register_gradient

__all__ = ["NoGradient", "Node", "gradients", "register_gradient"]

"""Training wherever ONNX Runtime runs: a whole training step as one plain ONNX model.

Imports the engine and below.
"""

from opgrad.training.export.export import export_step
from opgrad.training.export.rules import AdagradRule, LionRule, MomentumRule

__all__ = ["AdagradRule", "LionRule", "MomentumRule", "export_step"]

"""Training wherever ONNX Runtime runs: a whole training step as one plain ONNX model.

Imports the engine and below.
"""

from opgrad.training.export.export import Exported, export_step
from opgrad.training.export.rules import AdagradRule, LionRule, MomentumRule, StepRule, rule

__all__ = ["AdagradRule", "Exported", "LionRule", "MomentumRule", "StepRule", "export_step", "rule"]

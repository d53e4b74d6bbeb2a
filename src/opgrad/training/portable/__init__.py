"""Training wherever ONNX Runtime runs: a whole training step as one plain ONNX model."""

from opgrad.training.portable.export import Exported, export_step
from opgrad.training.portable.rules import AdagradRule, LionRule, MomentumRule, StepRule, rule

__all__ = ["AdagradRule", "Exported", "LionRule", "MomentumRule", "StepRule", "export_step", "rule"]

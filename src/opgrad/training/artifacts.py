"""Making artifact sets, by the names of onnxruntime.training.artifacts; the code is in `opgrad.training.make`."""

from opgrad.training.make.artifacts import Artifacts, BatchNorm, LossType, OptimType, generate_artifacts

__all__ = ["Artifacts", "BatchNorm", "LossType", "OptimType", "generate_artifacts"]

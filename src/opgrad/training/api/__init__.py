"""The names of onnxruntime.training.api: training from artifacts, in the stock onnxruntime."""

from opgrad.training.api.checkpoint_state import CheckpointState, Parameter
from opgrad.training.api.module import Module
from opgrad.training.api.optimizer import LinearLRScheduler, Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter"]

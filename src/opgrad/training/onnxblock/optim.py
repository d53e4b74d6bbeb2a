"""Optimizers as blocks, by the names of onnxruntime.training.onnxblock; see `opgrad.training.make.blocks`."""

from opgrad.training.make.blocks.optim import *  # noqa: F403
from opgrad.training.make.blocks.optim import __all__ as __all__

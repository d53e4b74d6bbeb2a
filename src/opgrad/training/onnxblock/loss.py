"""Losses as blocks, by the names of onnxruntime.training.onnxblock; see `opgrad.training.make.blocks`."""

from opgrad.training.make.blocks.loss import *  # noqa: F403
from opgrad.training.make.blocks.loss import __all__ as __all__

"""Blocks that build a loss, an optimizer or a whole training graph onto an ONNX model.

The names are those of onnxruntime.training.onnxblock.
"""

from opgrad.training.make.blocks import Block, ForwardBlock, base, custom_op_library, empty_base
from opgrad.training.onnxblock import blocks, loss, optim
from opgrad.training.onnxblock.checkpoints import load_checkpoint_to_model, save_checkpoint
from opgrad.training.onnxblock.training import TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]

"""Optimizers as blocks, by the names of onnxruntime.training.onnxblock; see `opgrad.training.make.blocks`."""

from opgrad.training.make.blocks.optim import (
    SGD,
    AdamW,
    AdamWOptimizer,
    ClipGradNorm,
    SGDOptimizer,
)

__all__ = [
    "SGD",
    "AdamW",
    "AdamWOptimizer",
    "ClipGradNorm",
    "SGDOptimizer",
]

"""Optimizers as blocks, by the names of onnxruntime.training.onnxblock."""

from opgrad.training.make.blocks import SGD, AdamW, ClipGradNorm

__all__ = ["SGD", "AdamW", "ClipGradNorm"]

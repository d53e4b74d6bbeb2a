"""Kernels of layer and batch normalization and their gradients."""

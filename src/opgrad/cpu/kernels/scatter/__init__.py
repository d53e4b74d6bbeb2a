"""Kernels of elements that are picked by index or by range, and of their gradients."""

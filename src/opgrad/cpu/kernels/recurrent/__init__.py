"""Kernels of recurrent layers and their gradients."""

"""Kernels of convolution's gradients: signals, their products, and products of matrices of windows."""

"""Softmax in full: a call with attributes as an operator of its own, whose kernels are those of `cpu/fused`."""

"""Kernels for NVIDIA GPUs, in Triton, which is imported with the first of them."""

# Bytes of the widest access of a thread. Triton compiles such accesses for addresses that are multiples of this.
ALIGNMENT = 16

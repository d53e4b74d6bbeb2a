"""How, on NVIDIA GPUs: kernels in Triton, which the first of them imports. Imports `ops` and below."""

# Bytes of the widest access of a thread. Triton compiles such accesses for addresses that are multiples of this.
ALIGNMENT = 16
# Sums of squares that make the norm of all gradients, a program each.
PARTS = 1024

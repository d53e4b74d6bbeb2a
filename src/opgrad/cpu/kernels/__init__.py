"""What runs compiled: kernels, the functions that they call, and those that make kernels."""

"""The CPU: the compiler, kernels, and the programs that put these together."""

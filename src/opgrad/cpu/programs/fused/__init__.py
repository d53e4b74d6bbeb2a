"""Softmax with attributes: the formulas of a call, and the program of the kernel that is compiled for its form."""

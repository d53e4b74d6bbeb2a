"""Kernels of softmax with attributes, each compiled for the form of a call: its formulas without their numbers."""

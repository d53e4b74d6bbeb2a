"""Softmax with attributes: kernels made for a form of call, and programs of stages for rare calls."""

"""Gradients of arithmetic that broadcasts, and what they need to know of shapes."""

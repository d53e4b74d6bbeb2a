"""Gelu, its approximations, and their gradients."""

"""Gradients of layer and batch normalization."""

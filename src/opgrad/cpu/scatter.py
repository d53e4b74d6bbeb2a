"""Gradients of picking elements and slices: each goes back to where it came from."""

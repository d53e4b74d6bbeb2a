"""Example arguments for the operators of opgrad.ops.loss."""

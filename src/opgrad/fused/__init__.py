"""Softmax in full: a call with attributes as an operator of its own, whose programs `cpu/programs/fused` makes."""

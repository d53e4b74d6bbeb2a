"""Kernels of softmax with attributes, each compiled for the form of a call: its formulas without their numbers.

form       the form of a call, and what an element of a result is
chain      formulas one after the other
post_ops   the formulas of post-ops and of their gradients
operands   how each layout finds and reads operands of any strides
rows, columns, split    the kernels of a layout
copying    copies of operands that no layout reads
"""

"""What kernels of softmax with attributes are made of: chains of formulas, operands of any strides, and stages."""

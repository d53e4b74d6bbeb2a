"""The gradient of convolution."""

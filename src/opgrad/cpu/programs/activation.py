"""Activations and their gradients: the result of each kernel, and the operands that its formula takes, in order."""

from opgrad.cpu.kernels import activation as kernels
from opgrad.cpu.programs.elements import operator

relu = operator(kernels.relu, "y", "x")
relu_grad = operator(kernels.relu_grad, "dx", "dy", "x")
sigmoid = operator(kernels.sigmoid, "y", "x")
sigmoid_grad = operator(kernels.sigmoid_grad, "dx", "dy", "y")
tanh = operator(kernels.tanh, "y", "x")
tanh_grad = operator(kernels.tanh_grad, "dx", "dy", "y")
quick_gelu = operator(kernels.quick_gelu, "y", "x")
quick_gelu_grad = operator(kernels.quick_gelu_grad, "dx", "dy", "x")
leaky_relu = operator(kernels.leaky_relu, "y", "x")
leaky_relu_grad = operator(kernels.leaky_relu_grad, "dx", "dy", "y")

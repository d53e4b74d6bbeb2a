"""The programs of activations: the result of each kernel, and the operands that its formula takes, in order."""

import math
from functools import partial

from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import Kernel
from opgrad.cpu.compiler.parameters import Rows
from opgrad.cpu.kernels import activation as kernels
from opgrad.cpu.kernels.loops.map import BLOCK
from opgrad.cpu.programs.building import ProgramSteps, elementwise_operator, elementwise_program
from opgrad.cpu.runtime.plan import Program, ceil_div

relu = elementwise_operator(kernels.relu, "y", "x")
relu_grad = elementwise_operator(kernels.relu_grad, "dx", "dy", "x")
sigmoid = elementwise_operator(kernels.sigmoid, "y", "x")
sigmoid_grad = elementwise_operator(kernels.sigmoid_grad, "dx", "dy", "y")
tanh = elementwise_operator(kernels.tanh, "y", "x")
tanh_grad = elementwise_operator(kernels.tanh_grad, "dx", "dy", "y")
quick_gelu = elementwise_operator(kernels.quick_gelu, "y", "x")
quick_gelu_grad = elementwise_operator(kernels.quick_gelu_grad, "dx", "dy", "x")
leaky_relu = elementwise_operator(kernels.leaky_relu, "y", "x")
leaky_relu_grad = elementwise_operator(kernels.leaky_relu_grad, "dx", "dy", "y")
gelu = elementwise_operator(kernels.gelu, "y", "x")
fast_gelu = elementwise_operator(kernels.fast_gelu, "y", "x")
gelu_grad = elementwise_operator(kernels.gelu_grad, "dx", "dy", "x")
fast_gelu_grad = elementwise_operator(kernels.fast_gelu_grad, "dx", "dy", "x")


def _behind_bias(problem: Problem, kernel: Kernel) -> Program:
    steps, spec = ProgramSteps(problem), problem.specs["dy"]
    rows, n = math.prod(spec.shape[:-1]), spec.shape[-1]
    blocks, unit_bytes = ceil_div(n, BLOCK), 3 * spec.dtype.itemsize * min(n, BLOCK)
    dy, x, bias, y = (Rows(problem[name], 0 if name == "bias" else n) for name in ("dy", "x", "bias", "dx"))
    steps.add(kernel, rows * blocks, unit_bytes, blocks=blocks, n=n, inputs=(dy, x, bias), y=y, alpha=0.0)
    return steps


bias_gelu_grad_dx = partial(_behind_bias, kernel=kernels.BIAS_GELU_GRAD)
bias_fast_gelu_grad_dx = partial(_behind_bias, kernel=kernels.BIAS_FAST_GELU_GRAD)


def gated_linear_unit(problem: Problem) -> Program:
    return elementwise_program(problem, kernels.GATED[problem.attributes["activation"]], "y", "gate", "up")


def gated_linear_unit_grad(problem: Problem) -> Program:
    steps, n = ProgramSteps(problem), math.prod(problem.specs["dy"].shape)
    steps.add(kernels.GATED_GRADIENTS[problem.attributes["activation"]], ceil_div(n, kernels.GATED_BLOCK), n=n)
    return steps

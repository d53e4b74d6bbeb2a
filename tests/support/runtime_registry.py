"""The operators that a stock session of onnxruntime runs on the CPU, as its own registry has them."""

from onnx import defs
from onnxruntime.capi import onnxruntime_pybind11_state as state


def operators():
    """Domain and name of each: those with a kernel, and those that are written with others, as ONNX defines them."""
    kernels = {(each.domain, each.op_name) for each in state.get_all_opkernel_def()}
    known = {(each.domain, each.name) for each in state.get_all_operator_schema()}
    return sorted(kernels | {key for key in known - kernels if _is_function(*key)})


def _is_function(domain, name):
    if domain or not defs.has(name):
        return False
    schema = defs.get_schema(name)
    return schema.has_function or schema.has_context_dependent_function

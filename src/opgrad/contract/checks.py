"""Checks a call's arrays and attributes against the declaration.

A message names the operator and the argument, says what the argument is, and what was expected.
"""

from collections.abc import Mapping

from opgrad.contract.attributes import Beside, dimensions
from opgrad.contract.declaration import Operator, Tensor
from opgrad.contract.dtypes import Attributes, Shapes, Spec


def check_arrays(op: Operator, specs: Mapping[str, Spec | None], attributes: Attributes) -> None:
    """Raise TypeError or ValueError unless the arrays are what the declaration asks for."""
    for name, tensor in op.inputs.items():
        spec = specs[name]
        if spec is None:
            if name not in op.optional:
                raise TypeError(f"{op.name}: {name} is None, expected an array")
            continue
        _check_dtype(op, name, spec, tensor, specs)
    shapes = {name: spec.shape for name, spec in specs.items() if spec is not None}
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        if len(shape) not in tensor.ranks:
            several = " or ".join(map(str, tensor.ranks))
            allowed = f"at least {tensor.ranks.start}" if tensor.ranks.stop > 64 else several
            raise ValueError(f"{op.name}: {name} has {dimensions(len(shape))}, expected {allowed}")
    normalise(op, attributes, shapes)
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        expected = tensor.shape and tensor.shape(shapes, attributes)
        if expected is not None and shape != expected:
            raise ValueError(f"{op.name}: {name} has shape {shape}, expected {expected}, {tensor.as_in}")


def _check_dtype(op: Operator, name: str, spec: Spec, tensor: Tensor, specs: Mapping[str, Spec | None]) -> None:
    if not spec.dtype.isnative:
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype} in foreign byte order, expected native byte order")
    if spec.dtype.name not in tensor.dtypes:
        expected = ", ".join(tensor.dtypes)
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype.name}, expected one of {expected}")
    model = specs[tensor.dtype_of] if tensor.dtype_of else None
    if model is not None and model.dtype != spec.dtype and spec.dtype.name not in tensor.besides:
        expected = f"{model.dtype.name}, the dtype of {tensor.dtype_of}"
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype.name}, expected {expected}")


def normalise(op: Operator, attributes: Attributes, shapes: Shapes) -> None:
    """Check the attributes, and replace them by what kernels take: an axis by a range, a dtype by np.dtype."""
    beside = Beside(op.results, shapes, attributes)
    for name, value in attributes.items():
        if isinstance(value, str) and type(value) is not str:
            value = attributes[name] = str.__str__(value)  # str() of an enumeration's member may differ
        if name in op.checks:
            attributes[name] = op.checks[name](f"{op.name}: {name}", value, beside)

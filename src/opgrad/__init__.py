"""Training kernels for NumPy arrays and, under their original names, for stock onnxruntime.

The files at the top name what people use, and say where its code is. Imports `call` and `onnx/gradients`.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from opgrad.base.locks import settling

if TYPE_CHECKING:
    from opgrad import post_ops as post_ops
    from opgrad.call.names import *  # noqa: F403
    from opgrad.call.operators import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Load NumPy and all operators with the first name that is used, so that `opgrad --version` does without."""
    if name == "post_ops":
        import opgrad.post_ops

        return opgrad.post_ops
    if find_spec(f"{__name__}.{name}") is None:  # else it is a module that is about to be imported
        with settling:  # a fork never meets the modules half imported
            from opgrad.call import names

        if name == "__all__":
            return [*names.__all__, "post_ops"]
        if name in names.__all__:
            return globals().setdefault(name, getattr(names, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Its own names, with those that are not loaded yet."""
    return sorted({*globals(), *__getattr__("__all__")})

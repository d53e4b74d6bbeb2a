"""opgrad's operators under their original names (domains com.microsoft and ai.onnx) in the stock onnxruntime."""

from typing import TYPE_CHECKING, Any

try:
    import onnxruntime  # noqa: F401
except ImportError as error:
    missing = "opgrad.onnxruntime: onnxruntime cannot be imported; install it with: pip install 'opgrad[onnx]'"
    raise ImportError(missing) from error

from opgrad.onnxruntime.sessions import InferenceSession, register

if TYPE_CHECKING:
    from opgrad.onnxruntime.bodies.reasons import NOT_LOWERED
    from opgrad.onnxruntime.lowering import LOWERED, lower

__all__ = ["LOWERED", "NOT_LOWERED", "InferenceSession", "lower", "register"]


def __getattr__(name: str) -> Any:
    """Sessions need no onnx, so that what lowers models is imported when it is asked for."""
    if name not in ("LOWERED", "NOT_LOWERED", "lower"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from opgrad.onnxruntime import lowering

    return getattr(lowering, name)

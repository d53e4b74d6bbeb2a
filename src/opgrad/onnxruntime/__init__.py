"""opgrad's operators under their original names (domains com.microsoft and ai.onnx) in the stock onnxruntime.

Imports `onnx/plain`, `cpu`, `cuda` and below.

Each name is imported when it is first used: sessions need no onnx, and functions that change models no onnxruntime.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrad.onnx.plain import LOWERED, NOT_LOWERED, lower
    from opgrad.onnxruntime.sessions import InferenceSession, register

__all__ = ["LOWERED", "NOT_LOWERED", "InferenceSession", "lower", "register"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("InferenceSession", "register"):
        from opgrad.onnxruntime import sessions

        return getattr(sessions, name)
    from opgrad.onnx import plain

    return getattr(plain, name)

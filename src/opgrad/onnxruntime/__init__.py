"""opgrad's operators under their original names (domains com.microsoft and ai.onnx) in the stock onnxruntime.

Each name is imported when it is first used: sessions need no onnx, and functions that change models no onnxruntime.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrad.forms.lowering import LOWERED, lower
    from opgrad.forms.reasons import NOT_LOWERED
    from opgrad.onnxruntime.sessions import InferenceSession, register

__all__ = ["LOWERED", "NOT_LOWERED", "InferenceSession", "lower", "register"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = "onnxruntime.sessions" if name in ("InferenceSession", "register") else "forms.lowering"
    return getattr(import_module(f"opgrad.{place}"), name)

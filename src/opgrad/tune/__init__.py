"""Fine-tuning of language models: their graphs, adapters, texts, and results. Imports `training` and below."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrad.tune.lora import Lora
    from opgrad.tune.tuner import Tuner

__all__ = ["Lora", "Tuner"]


def __getattr__(name: str) -> Any:
    """Load onnx and onnxruntime with the first name that is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from opgrad.tune import lora, tuner

    return lora.Lora if name == "Lora" else tuner.Tuner

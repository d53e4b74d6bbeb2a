"""Language models of ONNX as training takes them: without caches, with their products found, and with a loss."""

from opgrad.training.language.model import LanguageModel, read
from opgrad.training.language.products import Product

__all__ = ["LanguageModel", "Product", "read"]

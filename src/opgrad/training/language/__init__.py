"""Language models of ONNX as training takes them: without caches, with their products found, and with a loss."""

from opgrad.training.language.memory import Plan, ends_of_layers, plan
from opgrad.training.language.model import LanguageModel, read
from opgrad.training.language.products import Product

__all__ = ["LanguageModel", "Plan", "Product", "ends_of_layers", "plan", "read"]

"""Language models of ONNX as training takes them: without caches, with their products found, and with a loss."""

from opgrad.tune.language.memory import Limit, MemoryPlan, Room, ends_of_layers, limit_of, plan
from opgrad.tune.language.model import LanguageModel, read
from opgrad.tune.language.packed_weights import use_tiles
from opgrad.tune.language.packing import PLACES, STARTS, packed_rows
from opgrad.tune.language.products import WeightProduct

__all__ = [
    "PLACES",
    "STARTS",
    "LanguageModel",
    "Limit",
    "MemoryPlan",
    "Room",
    "WeightProduct",
    "ends_of_layers",
    "limit_of",
    "packed_rows",
    "plan",
    "read",
    "use_tiles",
]

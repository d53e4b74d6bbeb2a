"""Which weights are quantized, by names and patterns of the model that was given."""

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from opgrad.training.make.patterns import matching
from opgrad.training.make.selection import Candidates

# What onnxruntime's optimizer writes in front of the name of a weight with which it multiplied another.
FUSED = re.compile(r"(Conv\w*?Fusion_W_)+")
KINDS = ("weight that is quantized", "weight that is quantized")
Choose: TypeAlias = Callable[[Iterable[str]], set[str]]  # of weights that could be quantized, those that are


def choice(weights: Iterable[str], candidates: Candidates) -> Choose:
    """The choice of these weights: names or patterns.

    candidates: of the model that was given, whose names they are.
    """

    def choose(known: Iterable[str]) -> set[str]:
        """Raises ValueError for a name or a pattern that matches none of the known ones."""
        origins = {result: name for name in candidates.weights for result in candidates.results(name)}
        own = {name: origins.get(plain := FUSED.sub("", name), plain) for name in known}
        names = list(dict.fromkeys(own.values()))
        exact, loose = matching("weights", weights, names, names, candidates.modules, KINDS)
        return {name for name, origin in own.items() if origin in {*exact, *loose}}

    return choose

"""Names and patterns by which users choose tensors, everywhere in the same way.

A pattern is one of the shell, such as `layers.0.*`. It matches names of tensors, and the names that tensors would have
in the modules that read them; `names_in_modules` and `Candidates.modules` have these.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from opgrad.base.arguments import ArgumentError, ArgumentTypeError
from opgrad.training.make.checks import listed, near

PATTERN = "*?["
INITIALIZERS = "initializer of the model", "weight of the model"


def fits(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern is one of several names of a tensor, or matches it."""
    return any(fnmatch.fnmatchcase(name, pattern) or name == pattern for name in names)


def matching(
    what: str, given: Iterable[str], names: Iterable[str], weights: Sequence[str],
    modules: Mapping[str, Sequence[str]], kinds: tuple[str, str] = INITIALIZERS,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """The given names, and the weights that match given patterns. Raises ArgumentError for one that matches nothing.

    names: of all tensors. weights: of those that patterns match. modules: further names of weights, see `Candidates`.
    kinds: what the names are of, and what patterns match, for messages.
    """
    known, exact, loose = dict.fromkeys(names), [], []
    for each in _texts(what, given):
        if each in known:
            exact.append(each)
        elif found := [name for name in weights if each in modules.get(name, ())]:
            exact += found
        elif found := [name for name in weights if fits(each, (name, *modules.get(name, ())))]:
            loose += found
        else:
            more = chain.from_iterable(modules.values())
            raise ArgumentError(what, f"has {each!r}, {_nothing(each, [*known, *more], *kinds)}")
    return list(dict.fromkeys(exact)), list(dict.fromkeys(loose))


def _nothing(given: str, names: list[str], one: str, several: str) -> str:
    """The reason why a name or a pattern matches nothing, for a message."""
    if not set(PATTERN) & set(given):
        return f"which is no {one}{near(given, names)}"
    if others := [name for name in names if fits(given, (name,))]:
        return f"which matches no {several.split()[0]}, but {listed(others)}: name those in full"
    return f"which matches no {several}{near(given, names)}"


def _texts(what: str, given: Iterable[str]) -> list[str]:
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(what, f"has {name!r}, expected names")
    return names

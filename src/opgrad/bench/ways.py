"""The two ways in which users work: with results in new memory, and in memory that is given (`out=`)."""

from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], object]

NEW, GIVEN = WAYS = ("new", "given")
LACKING = {NEW: "always wants memory for its results", GIVEN: "has no way to write into memory that is given"}


class NoSuchWay(Exception):
    """What a peer raises that does not work in a way."""


def only(way: str, asked: str) -> None:
    """Raise NoSuchWay unless that is the way which is asked for."""
    if way != asked:
        raise NoSuchWay(LACKING[asked])


def by_way(times: Mapping[str, Any], notes: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """What a result file holds of each way: times by name, and what kept peers from it."""
    found: dict[str, dict[str, Any]] = {way: {"times": {}, "notes": dict(each)} for way, each in notes.items()}
    for key, taken in times.items():
        way, _, name = key.partition(" ")
        found[way]["times"][name] = taken
    return found

"""The two ways in which users work: with results in new memory, and in memory that is given (`out=`)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from opgrad.bench.measure import COPY

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


def measured(
    times: Mapping[str, Any], notes: Mapping[str, Mapping[str, str]], traffic: int, copied: int, error: float
) -> dict[str, Any]:
    """What a result file holds of a cell's measurement.

    times: of the copy, and of each way and contestant. notes: by way, what kept peers from it. traffic: bytes that a
    call moves. copied: bytes that the copy moves. error: of our results, in units in the last place.
    """
    return {
        "bytes": traffic,
        "copied_bytes": copied,
        "error_ulp": error if math.isfinite(error) else None,
        "copy": times[COPY],
        "ways": by_way({name: taken for name, taken in times.items() if name != COPY}, notes),
    }

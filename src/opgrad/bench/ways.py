"""The two ways in which users work: with results in new memory, and in memory that is given (`out=`)."""

from collections.abc import Callable

Call = Callable[[], object]

NEW, GIVEN = WAYS = ("new", "given")
LACKING = {NEW: "always wants memory for its results", GIVEN: "has no way to write into memory that is given"}


class NoSuchWay(Exception):
    """What a peer raises that does not work in a way."""


def only(way: str, asked: str) -> None:
    """Raise NoSuchWay unless that is the way which is asked for."""
    if way != asked:
        raise NoSuchWay(LACKING[asked])

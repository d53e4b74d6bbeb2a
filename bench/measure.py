"""How time is taken: turn by turn, so that a slow moment of the machine hits everybody alike.

Users work in two ways: with results in new memory, and in memory that is given (`out=`).
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

OURS, COPY = "opgrad", "copy"  # the contestants that are always there
TURN = 0.002  # seconds of calls in a turn, at least one call
SLOW = 0.02  # seconds of a call that cannot be a short one, whose threads slept
BATCH = 20e-6  # seconds between two looks at the clock: long against the 0.1 µs that a look costs
FEWEST = 7  # rounds, so that a median is one of seven times at least
QUIET = 0.2  # share of a core: below, no other's threads are spinning any more
WINDOW = 0.01  # seconds of a look: a thread's time is only counted at the ticks of the system's clock
LONGEST_WAIT = 0.1  # seconds
Cell = TypeVar("Cell")
Name = TypeVar("Name")  # of a contestant
Call = Callable[[], object]

GIVEN, NEW = WAYS = ("given", "new")
LACKING = {NEW: "always wants memory for its results", GIVEN: "has no way to write into memory that is given"}


class Enough(Exception):
    """No further cell is to be measured."""


def measure_each(
    cells: Sequence[Cell],
    measure: Callable[[Cell], dict[str, Any]],
    progress: Callable[[int, int, Cell], None],
    keep: Callable[[list[dict[str, Any]]], object] = len,
) -> list[dict[str, Any]]:
    """What was measured of each cell: of those done so far, if the user interrupts.

    progress: called before each; may raise `Enough`. keep: called after each with all that was measured.
    """
    measured: list[dict[str, Any]] = []
    try:
        for done, cell in enumerate(cells):
            progress(done, len(cells), cell)
            measured.append(measure(cell))
            keep(measured)
    except Enough:
        pass
    except KeyboardInterrupt:
        if not measured:
            raise
    return measured


def interleaved(calls: Mapping[Name, Call], seconds: float) -> dict[Name, dict[str, float]]:
    """Median and minimum time of each call by name; they take turns for about this many seconds.

    A turn begins when the threads of the one before have stopped spinning.
    """
    return take_turns({name: turns(call) for name, call in calls.items()}, seconds)


def turns(call: Call, short: float = TURN) -> Callable[[], list[float]]:
    """What takes a turn with a call; it is called now, to find out how long a turn is.

    short: seconds of a call below which the first of a turn only wakes the threads.
    """
    once = timed(call, 1)
    if once < SLOW:
        once = min(timed(call, 1) for _ in range(3))
    batch = max(1, math.ceil(BATCH / max(once, 1e-7)))

    def turn() -> list[float]:
        """Seconds of a call, once, or several times if it is a short one: then the first only wakes the threads."""
        settle()
        first = timed(call, batch)
        if once >= short:
            return [first]
        samples: list[float] = []
        while sum(samples) * batch < TURN:
            samples.append(timed(call, batch))
        return samples

    return turn


def hot_turns(call: Call) -> Callable[[], list[float]]:
    """The same for a step of training, however long: in a loop its threads have just had work."""
    return turns(call, math.inf)


def take_turns(contestants: Mapping[Name, Callable[[], list[float]]], seconds: float) -> dict[Name, dict[str, float]]:
    """Median and minimum of the times that each turn takes, by name; round after round, for so many seconds."""
    samples: dict[Name, list[float]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    rounds = 0
    gc.disable()
    try:
        while rounds < FEWEST or time.perf_counter() < end:
            for name, turn in contestants.items():
                samples[name] += turn()
            rounds += 1
    finally:
        gc.enable()
    return {
        name: {"median": statistics.median(taken), "minimum": min(taken), "samples": len(taken)}
        for name, taken in samples.items()
    }


def timed(call: Call, count: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def settle() -> None:
    """Wait until this process is quiet: OpenMP's threads spin for milliseconds after their last work."""
    end = time.perf_counter() + LONGEST_WAIT
    while time.perf_counter() < end:
        start, busy = time.perf_counter(), time.process_time()
        time.sleep(WINDOW)
        if time.process_time() - busy < QUIET * (time.perf_counter() - start):
            return


# --- ways of working ------------------------------------------------------------------------------------------------


class NoSuchWay(Exception):
    """What a peer raises that does not work in a way."""


def only(way: str, asked: str) -> None:
    """Raise NoSuchWay unless that is the way which is asked for."""
    if way != asked:
        raise NoSuchWay(LACKING[asked])


def raced(
    ours: Mapping[str, Any],
    rivals: Callable[[str], tuple[Mapping[str, Any], dict[str, str]]],
    race: Callable[[dict[tuple[str, str], Any]], Mapping[tuple[str, str], Any]],
    copy: Any = None,
) -> dict[str, Any]:
    """What a result file holds of a cell's times.

    ours: our call in each way. rivals: those of peers in a way, and what keeps others from it. race: takes the times
    of calls, which have a way and a name. copy: what copies as many bytes, if anything does.
    """
    calls: dict[tuple[str, str], Any] = {} if copy is None else {("", COPY): copy}
    notes: dict[str, dict[str, str]] = {}
    for way, call in ours.items():
        found, notes[way] = rivals(way)
        calls |= {(way, name): each for name, each in {OURS: call, **found}.items()}
    times: dict[str, dict[str, Any]] = {}
    for (way, name), taken in race(calls).items():
        times.setdefault(way, {})[name] = taken
    ways = {way: {"times": times[way], "notes": notes[way]} for way in ours}
    return {"ways": ways} if copy is None else {"copy": times[""][COPY], "ways": ways}


def finite(error: float) -> float | None:
    """An error as JSON has it: None if it is infinite or NaN."""
    return error if math.isfinite(error) else None

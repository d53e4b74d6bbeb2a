"""The curve of the loss in a terminal, while a model trains: what `opgrad train --live` shows over the bar."""

import math
import time
from contextlib import AbstractContextManager

import numpy as np
import plotext
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from opgrad.base.terminal import visible
from opgrad.training.run.report import TrainingBar

INTERVAL = 0.25  # seconds between two pictures; drawing one takes about 5 ms
HEIGHT = 16  # lines of the picture
MOST_COLUMNS = 120
LOGARITHMIC = 10  # the scale is logarithmic if the highest loss is so many times the lowest one or more
USUAL, FAR = 0.98, 3.0  # losses are cut off if their range exceeds FAR times the range up to this quantile
MOST_MARKS = 7  # the most marks on an axis
POINTS = 2000  # the most points of a curve; when there are more, every other one is dropped


class RunCurve:
    """A curve over a run of any length: at most POINTS numbers, evenly spread."""

    def __init__(self) -> None:
        self.places: list[float] = []
        self.values: list[float] = []
        self._every, self._seen = 1, 0

    def add(self, place: float, value: float) -> None:
        """Add a number; one that is not finite is left out."""
        self._seen += 1
        if self._seen % self._every or not -1e300 < value < 1e300:
            return
        self.places.append(place)
        self.values.append(value)
        if len(self.places) > POINTS:
            del self.places[::2], self.values[::2]
            self._every *= 2


class LiveCurve(AbstractContextManager["LiveCurve"]):
    """A progress bar under a picture of the losses, or lines before one; used as `TrainingBar` is."""

    def __init__(self, console: Console, description: str, unit: str = "samples", epochs: int = 1):
        self._bar = TrainingBar(console, description, unit, epochs)
        self._console, self._title = console, visible(description)
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._training, self._validation = RunCurve(), RunCurve()
        self._last_validation: float | None = None
        self._shown = 0.0

    def __exit__(self, *error: object) -> None:
        if self._live.is_started:
            self._show()
            self._live.stop()
            if not self._console.is_terminal:
                self._console.line()

    def __call__(self, done: int, total: int, loss: float, validation_loss: float | None, speed: float) -> None:
        """Show that `done` of `total` rows are trained, the last losses, and the rows of a second."""
        self._training.add(done, loss)
        if validation_loss is not None and validation_loss != self._last_validation:
            self._last_validation = validation_loss
            self._validation.add(done, validation_loss)
        self._bar.update(done, total, loss, validation_loss, speed)
        if self._bar.lines is not None:
            self._bar.lines(done, total, loss, validation_loss, speed)
        now = time.perf_counter()
        if not self._live.is_started:
            self._live.start()
        if now - self._shown >= INTERVAL or done >= total:
            self._shown = now
            self._show()

    def _show(self) -> None:
        self._live.update(Group(Text.from_ansi(self.picture()), self._bar.rendered()), refresh=True)

    def picture(self) -> str:
        """The curves as lines of text."""
        if not self._training.places:
            return f"{self._title}: loss: no number yet"
        curves = [(self._training, "loss of a batch", "braille"), (self._validation, "validation", "o")]
        curves = [each for each in curves if each[0].values]
        values = np.concatenate([curve.values for curve, _, _ in curves])
        low, high = _limits(values)
        scale = np.log10 if low > 0 and high > LOGARITHMIC * low else np.asarray
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plot_size(min(self._console.width, MOST_COLUMNS), HEIGHT)
        for curve, label, marker in curves:
            shown = scale(np.clip(curve.values, low, high))
            plotext.plot(curve.places, shown.tolist(), label=label, marker=marker)
        plotext.ylim(*scale([low, high]).tolist())
        marks = _decades(low, high) if scale is np.log10 else _round(low, high)
        plotext.yticks(scale(marks).tolist(), [f"{mark:g}" for mark in marks])
        places = _round(0, max(max(curve.places) for curve, _, _ in curves))
        plotext.xlim(0, max(places[-1], *(max(curve.places) for curve, _, _ in curves)))
        plotext.xticks(places, [f"{place:,.0f}" for place in places])
        plotext.xlabel("rows trained")
        plotext.title(f"{self._title}: loss")
        return str(plotext.build())


def _limits(values: np.ndarray) -> tuple[float, float]:
    """The lowest and the highest loss that are shown; a few that lie far above all others are cut off."""
    low, high = float(values.min()), float(values.max())
    most = float(np.quantile(values, USUAL))
    if high - low > FAR * (most - low) > 0:
        high = most + (most - low) / 4
    if high <= low:
        return low - abs(low) / 10 - 1e-12, high + abs(low) / 10 + 1e-12
    return low, high


def _round(low: float, high: float) -> list[float]:
    """A few round numbers between two numbers, for the marks of an axis."""
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(times * step for times in (1, 2, 5, 10, 20) if (high - low) / (times * step) <= MOST_MARKS)
    marks = [float(f"{step * number:.12g}") for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return marks or [low]


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of 10 between two numbers, or the powers alone if these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for times in ((1, 2, 5), (1, 3), (1,)):
        marks = [float(f"{each}e{power}") for power in powers for each in times]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) <= MOST_MARKS:
            break
    return marks[:: math.ceil(len(marks) / MOST_MARKS)]

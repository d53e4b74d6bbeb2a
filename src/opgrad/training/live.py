"""The curve of the loss in a terminal, while a model trains: what `opgrad train --live` shows over the bar."""

import time
from types import TracebackType
from typing import Self

import plotext
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from opgrad.terminal import visible
from opgrad.training.report import TrainingBar

INTERVAL = 0.25  # seconds between two pictures: one takes about 5 ms
HEIGHT = 16  # lines
MOST_COLUMNS = 120
POINTS = 2000  # that are kept of each curve; every other one goes when there are more


class Curve:
    """Numbers over a run that may be long: no more than POINTS of them, evenly spread."""

    def __init__(self) -> None:
        self.places: list[float] = []
        self.values: list[float] = []
        self._every, self._seen = 1, 0

    def add(self, place: float, value: float) -> None:
        """One more number; what is not finite has no place in a picture."""
        self._seen += 1
        if self._seen % self._every or not -1e300 < value < 1e300:
            return
        self.places.append(place)
        self.values.append(value)
        if len(self.places) > POINTS:
            del self.places[::2], self.values[::2]
            self._every *= 2


class LiveCurve:
    """A progress bar under a picture of the losses; used as `TrainingBar` is."""

    def __init__(self, console: Console, description: str):
        self._bar = TrainingBar(console, description)
        self._console, self._title = console, visible(description)
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._training, self._validation = Curve(), Curve()
        self._last_validation: float | None = None
        self._shown = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plot_size(min(self._console.width, MOST_COLUMNS), HEIGHT)
        plotext.plot(self._training.places, self._training.values, label="loss of a batch", marker="braille")
        if self._validation.places:
            plotext.plot(self._validation.places, self._validation.values, label="validation", marker="o")
        plotext.xlabel("rows trained")
        plotext.title(f"{self._title}: loss")
        return str(plotext.build())

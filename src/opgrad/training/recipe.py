"""The settings of a training run, as a folder keeps them beside its artifact set."""

import tomllib
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

FILE = "recipe.toml"


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run; every one may be left out of recipe.toml.

    dataset: the name of a dataset that opgrad can find itself ("digits"), or None.
    divide: by input, the number that its values are divided by before they reach the graph.
    test_rows: how many rows are kept for the test; None keeps a fifth.
    split_seed: rows are parted in the order of `default_rng(split_seed).permutation`, the test rows last.
    seed: epoch e (from 0) takes its rows in the order of `default_rng(seed + e).permutation`.
    epochs, learning_rate, batch_size: as usual.
    """

    dataset: str | None = None
    divide: dict[str, float] = field(default_factory=dict)
    test_rows: int | None = None
    split_seed: int = 0
    seed: int = 0
    epochs: int = 10
    learning_rate: float = 1e-3
    batch_size: int = 32

    def __post_init__(self) -> None:
        _require(isinstance(self.dataset, str | None), "dataset", self.dataset, "a name")
        _require(isinstance(self.divide, dict), "divide", self.divide, "a table of numbers")
        for name, divisor in self.divide.items():
            _require(_is_number(divisor) and divisor != 0, f"divide.{name}", divisor, "a number but 0")
        rows = self.test_rows
        _require(rows is None or _is_count(rows, 1), "test_rows", rows, "a whole number of at least 1")
        for name, least in (("split_seed", 0), ("seed", 0), ("epochs", 1), ("batch_size", 1)):
            value = getattr(self, name)
            _require(_is_count(value, least), name, value, f"a whole number of at least {least}")
        rate = self.learning_rate
        _require(_is_number(rate) and 0 < rate < float("inf"), "learning_rate", rate, "a number above 0")

    @classmethod
    def load(cls, directory: str | PathLike[str]) -> "Recipe":
        """Read recipe.toml of a folder; without that file everything has its default.

        Raises ValueError if the file is no TOML, holds an unknown key or a value that makes no sense.
        """
        path = Path(directory) / FILE
        if not path.is_file():
            return cls()
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"Recipe: {path} is no TOML file: {error}") from None
        unknown = settings.keys() - {item.name for item in fields(cls)}
        if unknown:
            known = ", ".join(item.name for item in fields(cls))
            raise ValueError(f"Recipe: {path} has the unknown key {min(unknown)!r}, expected {known}")
        return cls(**settings)


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"Recipe: {name} is {value!r}, expected {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

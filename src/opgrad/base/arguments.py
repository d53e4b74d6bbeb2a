"""Errors about arguments, as data: which argument, and what is wrong with it."""

from collections.abc import Iterator
from contextlib import contextmanager


class ArgumentError(ValueError):
    """A wrong argument.

    argument: its name in Python. text: what it is, and what was expected. caller: the function that was called, which
    `named` adds. The command line writes its option in the place of both.
    """

    def __init__(self, argument: str, text: str):
        super().__init__(argument, text)
        self.argument, self.text, self.caller = argument, text, ""

    def __str__(self) -> str:
        said = f"{self.argument} {self.text}"
        return f"{self.caller}: {said}" if self.caller else said


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a wrong type."""


@contextmanager
def naming(caller: str) -> Iterator[None]:
    """Let errors about arguments name the function that was called: the innermost one that does so is named."""
    try:
        yield
    except ArgumentError as error:
        error.caller = error.caller or caller
        raise

"""Errors as data: which argument is wrong, what is wrong with it, and the public function that was called.

Code below a public function raises errors without its name; `naming`, at the function, puts the name in front. What
warns below it asks `called` for the name.
"""

from contextlib import ContextDecorator
from contextvars import ContextVar

_callers: ContextVar[tuple[str, ...]] = ContextVar("callers", default=())  # the innermost last


class ArgumentError(ValueError):
    """A wrong argument.

    argument: its name in Python. text: what it is, and what was expected. caller: the function that was called, which
    `naming` adds. The command line writes its option in the place of both.
    """

    def __init__(self, argument: str, text: str):
        super().__init__(argument, text)
        self.argument, self.text, self.caller = argument, text, ""

    def __str__(self) -> str:
        said = f"{self.argument} {self.text}"
        return f"{self.caller}: {said}" if self.caller else said


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a wrong type."""


def require(holds: bool, argument: str, value: object, expected: str) -> None:
    """Raise ArgumentError of an argument unless what is expected of its value holds."""
    if not holds:
        raise ArgumentError(argument, f"is {value!r}, expected {expected}")


class naming(ContextDecorator):
    """Put the caller, the function or object that was called, in front of errors' texts, once: the innermost is named.

    A context manager, and a decorator. Errors of the system, which have a number and a file, stay as they are.
    """

    def __init__(self, caller: object):
        self.caller = str(caller)

    def __enter__(self) -> None:
        _callers.set((*_callers.get(), self.caller))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _callers.set(_callers.get()[:-1])
        if isinstance(error, ArgumentError):
            error.caller = error.caller or self.caller
        elif isinstance(error, Exception) and not hasattr(error, "caller") and list(map(type, error.args)) == [str]:
            error.args, error.caller = (f"{self.caller}: {error}",), self.caller  # type: ignore[attr-defined]


def called() -> str:
    """The innermost caller that `naming` names here; "opgrad" where there is none."""
    return next(reversed(_callers.get()), "opgrad")

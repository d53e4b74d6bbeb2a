"""The simplifications that `gradients` makes, for graphs that are put together in other ways."""

from opgrad.graph.passes import finish, prepare

__all__ = ["finish", "prepare"]

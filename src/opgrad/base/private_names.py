"""Looks up names that another library does not document, and records those that a release of it lacks."""

import importlib
from typing import Any


def look_up(path: str, missing: list[str], otherwise: Any = None) -> Any:
    """The object at this path, "module:name" or "module:name.name"; if there is none, `otherwise`.

    missing: where the path of a missing one is recorded.
    """
    module, _, name = path.rpartition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        missing.append(path)
        return otherwise
    return found

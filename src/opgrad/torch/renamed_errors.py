"""Rewrites errors of operators so that they name the function that the user has called, and its arguments."""

import re
from collections.abc import Mapping

ERRORS = (TypeError, ValueError, NotImplementedError)  # what operators raise


def in_words(error: Exception, words: Mapping[str, str]) -> Exception:
    """The same error with other names for operators and arguments."""
    found = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, words)) + r")(?!\w)")
    return type(error)(found.sub(lambda match: words[match[0]], str(error)))

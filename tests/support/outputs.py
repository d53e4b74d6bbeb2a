"""Results and the arguments whose memory they may take."""

import numpy as np


def packed(outputs):
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def in_place_pairs(op, arguments):
    """Each result with each argument whose memory it may take."""
    for result, names in op.in_place.items():
        yield from ((result, name) for name in names if name in arguments)


def in_place_calls(op, arguments, expected):
    """For each such pair the argument's name, arguments with a copy of it, and results of which one is that copy."""
    for result, name in in_place_pairs(op, arguments):
        own = arguments | {name: arguments[name].copy()}
        made = zip(op.results, expected, strict=True)
        yield name, own, [own[name] if each == result else np.empty_like(array) for each, array in made]

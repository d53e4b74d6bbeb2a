"""Results and the arguments whose memory they may take."""


def packed(outputs):
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def in_place_pairs(op, arguments):
    """Each result with each argument whose memory it may take."""
    for result, names in op.in_place.items():
        yield from ((result, name) for name in names if name in arguments)

"""Why a node cannot be differentiated."""


class NoGradient(NotImplementedError):
    """This node has no gradient; the text says why, and what helps."""

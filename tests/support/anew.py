"""Plans that are made anew, for tests that change what plans are made of."""

from opgrad.call import arrays
from opgrad.cpu import plans


def dispatcher(op):
    """A public function of the operator that knows no plan."""
    plans.PLANS.values.clear()
    return arrays.dispatcher(op)

"""Plans that are made anew, for tests that change what plans are made of."""

from opgrad.native import arrays, plans


def dispatcher(op):
    """A public function of the operator that knows no plan."""
    plans.PLANS.values.clear()
    return arrays.dispatcher(op)

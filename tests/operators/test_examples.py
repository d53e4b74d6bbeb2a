"""The example in each operator's documentation gives the result that stands below it."""

import doctest
import inspect

import numpy as np
import pytest

import opgrad
from opgrad.contract import graph_operators, operators

EVERY = {**operators(), **graph_operators()}


@pytest.mark.parametrize("name", EVERY)
def test_the_example_gives_what_it_shows(name):
    names = {"np": np, "opgrad": opgrad}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(EVERY[name].reference), names, name, None, 0)
    assert example.examples
    with np.printoptions(precision=4, suppress=True):
        found = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example)
    assert not found.failed

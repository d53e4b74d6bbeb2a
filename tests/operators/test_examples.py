"""The example in each operator's documentation gives the result that stands below it."""

import packed
import pytest

from opgrad.ops import public_operators


@pytest.mark.parametrize("name", public_operators())
def test_the_example_gives_what_it_shows(name):
    assert packed.shows_its_result(public_operators()[name])

"""What all tests of reports share."""

import functools

import pytest
from ringlab.measure import stats
from ringlab.report import reuse


@pytest.fixture(autouse=True, scope="session")
def quick():
    """Intervals a little coarser, in a tenth of the time; what a pool lends to a point is counted once."""
    lent = functools.cache(reuse.lent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 200)
        patch.setattr(reuse, "lent", lent)
        yield

"""What all tests of reports share."""

import pytest
from ringlab.measure import stats


@pytest.fixture(autouse=True, scope="session")
def quick():
    """Intervals a little coarser, in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 200)
        yield

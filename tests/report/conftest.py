"""What all tests of reports share."""

from dataclasses import fields
from functools import lru_cache

import pytest
from ringlab import meta_run
from ringlab.measure import stats
from ringlab.report import first_screen

KNOWN = {}


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Intervals a little coarser, in a tenth of the time; few lengths; a call at one is
    run without data once.
    """
    run = meta_run.run

    def once(call):
        about = [
            getattr(call, field.name)
            for field in fields(call)
            if field.name != "profile"
        ]
        key = (*about, call.device, call.profile and call.profile.capability)
        if key not in KNOWN:
            KNOWN[key] = run(call)
        return KNOWN[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 200)
        patch.setattr(
            stats, "_draws", lru_cache(stats._draws.__wrapped__)
        )  # what was drawn before is 2,000 long
        patch.setattr(first_screen, "LENGTHS", (8192, 131072))
        patch.setattr(meta_run, "run", once)
        yield

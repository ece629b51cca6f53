"""What all tests of reports share."""

from dataclasses import fields
from functools import lru_cache

import pytest
from ringlab.measure import stats
from ringlab.meta_run import MetaCall
from ringlab.report import first_screen

KNOWN = {}


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Intervals a little coarser, in a tenth of the time; few lengths; a call at one is
    run without data once.
    """
    at = MetaCall.at

    def once(call, n):
        about = [
            getattr(call, field.name)
            for field in fields(call)
            if field.name != "profile"
        ]
        key = (*about, call.device_type, call.profile and call.profile.capability, n)
        if key not in KNOWN:
            KNOWN[key] = at(call, n)
        return KNOWN[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 200)
        patch.setattr(
            stats, "_draws", lru_cache(stats._draws.__wrapped__)
        )  # what was drawn before is 2,000 long
        patch.setattr(first_screen, "LENGTHS", (8192, 131072))
        patch.setattr(MetaCall, "at", once)
        yield

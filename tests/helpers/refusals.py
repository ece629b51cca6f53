"""What must be refused."""

from contextlib import contextmanager

import pytest


@contextmanager
def refused(error, match: str | None = None):
    """Expect an error of one line."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)

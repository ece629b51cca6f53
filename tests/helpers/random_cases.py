"""How many random cases are tried: RINGLAB_CASES times the few of `make test`."""

import os

TIMES = int(os.environ.get("RINGLAB_CASES", "1"))


def seeds(few: int) -> range:
    return range(few * TIMES)

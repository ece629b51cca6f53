"""`RINGLAB_EXPERIMENTAL=1 make test` runs all of these tests; without it, test_smoke.py
alone.
"""

import os

collect_ignore_glob = (
    [] if os.environ.get("RINGLAB_EXPERIMENTAL") == "1" else ["test_[!s]*.py"]
)

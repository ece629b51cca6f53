"""What each test takes, as stored in tests/durations.json: seconds by file and name.

A test of less than LONG_S is stored with its function, as the mean over its parameters,
and none below LEAST_S. What a file's fixtures take is shared out among its tests. One
that is not stored runs in `make test` too.

    make test-all CASES=1 ARGS=--store-durations     # on a machine that does nothing else
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

FILE = Path(__file__).resolve().parents[1] / "durations.json"
LONG_S = 1.0  # what takes longer is left to `make test-all`
LEAST_S = 0.02


def stored() -> dict[str, dict[str, float]]:
    return json.loads(FILE.read_text())


def seconds(known: dict[str, dict[str, float]], nodeid: str) -> float:
    """Of a test; 0 where it is not stored."""
    file, _, name = nodeid.partition("::")
    tests = known.get(file, {})
    return tests.get(name, tests.get(name.partition("[")[0], 0.0))


def store(reports) -> None:
    """Write what the phases of tests took, and keep what is known of other files."""
    calls, fixtures = defaultdict(dict), defaultdict(float)
    for report in reports:
        file, _, name = report.nodeid.partition("::")
        if report.when == "call":
            calls[file][name] = report.duration
        else:
            fixtures[file] += report.duration
    known = {file: told for file, told in stored().items() if Path(file).exists()}
    for file, tests in calls.items():
        each, share = defaultdict(list), fixtures[file] / len(tests)
        for name, s in tests.items():
            function = name.partition("[")[0]
            each[name if s + share > LONG_S else function].append(s + share)
        means = {name: round(mean(each[name]), 2) for name in sorted(each)}
        known[file] = {name: s for name, s in means.items() if s >= LEAST_S}
    FILE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")

"""How `make test` shares out the tests among processes, which are no trouble to each
other's measurements.
"""

import functools
import os
import sys
import tempfile
import time
from pathlib import Path

import durations
import pytest

# jsonschema, which nbformat loads, takes two seconds for the grammar of addresses in
# this package. No test reads one.
sys.modules.setdefault("rfc3987_syntax", None)

collect_ignore_glob = ["*/conftest.py"]  # they hold no examples, and have one name

# A fixture of many seconds serves the whole file, or what was computed for one of its
# tests others ask for too.
COMPILED_ONCE = (
    "test_blocks.py::test_flex",
    "[fwd-flex]",
)  # by a compiler that takes seconds to import
MEASURED_ONCE = (
    "test_decode.py",
    "test_documents.py",
    "test_explore.py",
    "test_first_screen.py",
    "test_fused_merge.py",
    "test_landscape.py",
    "test_optimization.py",
    "test_predicted.py",
    "test_ranks.py",
    "test_report.py",
    "test_runs.py",
    "test_session.py",
    "test_triton.py",
)


def pytest_addoption(parser):
    text = "write what each test took to tests/durations.json"
    parser.addoption("--store-durations", action="store_true", help=text)


def pytest_collection_modifyitems(items):
    known = durations.stored()
    for item in items:
        if durations.seconds(known, item.nodeid) > durations.LONG_S:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("store_durations"):
        every = [x for some in terminalreporter.stats.values() for x in some]
        durations.store(x for x in every if hasattr(x, "duration"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One process more than there are cores, because some tests wait most of their
    time.
    """
    return (
        len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else None
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each test where there is room, the long files first and each in one process, as
    are tests of one kernel.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if any(part in nodeid for part in COMPILED_ONCE):
                return COMPILED_ONCE[0]
            file = nodeid.split("::", 1)[0]
            return file if file.endswith(MEASURED_ONCE) else nodeid

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def beside_other_tests():
    """Rows that tests measure count as undisturbed, though other tests run beside them,
    and get no more rounds.

    The code of the library, which no test changes, is hashed once: to read it takes a
    second for each report.
    """
    from ringlab.measure import provenance, session

    code_hash = provenance.code_hash
    known = functools.cache(lambda paths: code_hash(paths, provenance.PACKAGE))

    def once(paths, root):
        return (
            known(frozenset(paths))
            if root == provenance.PACKAGE
            else code_hash(paths, root)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "CONTENTION", 99.0)
        patch.setattr(session, "MORE_S", 0.0)
        patch.setattr(provenance, "code_hash", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_is_left(tmp_path_factory):
    """No test leaves a folder of the library in the temporary directory."""
    folder = tmp_path_factory.mktemp("t")
    compiled = Path(tempfile.gettempdir(), "torchinductor_tests")  # is kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield
    deadline = time.monotonic() + 10  # processes whose caller was killed remove theirs
    while (left := list(folder.glob("ringlab-*"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.fixture
def frequent_switches():
    """Threads change places between almost any two bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)

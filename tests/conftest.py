"""How `make test` shares out the tests among processes, which are no trouble to each other's measurements."""

import pytest

# A fixture of many seconds serves the whole file.
COMPILED_ONCE = "test_blocks.py::test_flex"
MEASURED_ONCE = (
    "test_documents.py", "test_landscape.py", "test_predicted.py", "test_ranks.py", "test_report.py", "test_runs.py",
    "test_triton.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each test where there is room, the long files first and each in one process, as are tests of one kernel."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if COMPILED_ONCE in nodeid:
                return COMPILED_ONCE
            file = nodeid.split("::", 1)[0]
            return file if file.endswith(MEASURED_ONCE) else nodeid

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def beside_other_tests():
    """Rows that tests measure count as undisturbed, though other tests run beside them."""
    from ringlab.measure import session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "CONTENTION", 99.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def library_hashed_once():
    """The code of the library, which no test changes: reading it takes a second, for each report that is made."""
    from ringlab.measure import provenance

    code_hash, known = provenance.code_hash, {}

    def once(paths, root):
        if root != provenance.PACKAGE:
            return code_hash(paths, root)
        paths = frozenset(paths)
        if paths not in known:
            known[paths] = code_hash(paths, root)
        return known[paths]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "code_hash", once)
        yield

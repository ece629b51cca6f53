"""Shared by the tests that measure: one process that forks the workers of all their runs."""

import pytest
from ringlab.measure import session, workers


class SharedHost(workers.Host):
    """The host of every session within its ``with`` block, as importing torch takes longer than what is measured.

    Its workers say once what the CPU's rates are.
    """

    def __enter__(self):
        self.patch, ask, rates = pytest.MonkeyPatch(), workers.Handle.ask, {}

        def remembered(handle, command, timeout_s, **arguments):
            if command != "probe":
                return ask(handle, command, timeout_s, **arguments)
            names = tuple(arguments["dtypes"])
            if names not in rates:
                rates[names] = ask(handle, command, timeout_s, **arguments)
            return dict(rates[names])

        self.patch.setattr(workers.Handle, "ask", remembered)
        self.patch.setattr(session, "Host", lambda: self)
        return self

    def __exit__(self, *_):
        self.patch.undo()
        super().close()

    def close(self) -> None:
        """The end of a run, and not of the host."""

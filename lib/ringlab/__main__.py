"""The command line as ``python -m ringlab``: see ``cli``.

SIGTERM and SIGHUP end it as Ctrl-C does, and so does the end of the make that started
it: no process and no folder is left behind.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux: a signal for the end of the process that started this

if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(stop, signal.default_int_handler)
    if "MAKELEVEL" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        from .cli import main

        raise SystemExit(main())
    except KeyboardInterrupt:  # while it was imported
        raise SystemExit(130) from None

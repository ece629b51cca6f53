"""The command line as ``python -m ringlab``: see ``cli``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())

#!/bin/sh
# Says in one line what the Python that make was given lacks, exit 2: needs.sh EXTRA "MODULE ..." PYTHON [OPTION ...].
set -u
extra=$1 modules=$2
shift 2
die() { echo "ringlab: $*" >&2; exit 2; }

lacks=$("$@" -c 'import sys
if sys.version_info < (3, 11):
    print("is Python %d.%d.%d, and 3.11 or newer is needed" % sys.version_info[:3])
else:
    from importlib.util import find_spec
    print(" ".join(name for name in sys.argv[1:] if not find_spec(name)))' $modules 2>/dev/null) ||
    die "'$*' is not a working Python; name one: make PYTHON=/path/to/python3.11 NOENV=1"
case $lacks in
    "") ;;
    is*) die "'$*' $lacks; name another: make PYTHON=/path/to/python3.11 NOENV=1" ;;
    *) if [ -n "${NOENV:-}" ]; then own="without NOENV=1"; else own="outside of this environment"; fi
       die "'$*' has no $(echo "$lacks" | sed 's/ /, /g'); run: $* -m pip install -c lib/constraints.txt -e './lib$extra'" \
           "(or call make $own: it sets up .venv)" ;;
esac

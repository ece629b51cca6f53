#!/bin/sh
# Builds .venv at the top of the checkout from pyproject.toml and constraints.txt; the Makefile calls it: setup.sh STAMP.
# Reads PYTHON (default python3), TORCH_INDEX (default: PyPI's build, or cu126 where the GPU is older than Turing),
# TORCH (a version, or newest: in place of the pinned one) and PEERS (not empty: the other packages that the landscape is
# measured beside, too).
set -eu
cd "$(dirname "$0")/.."
stamp=$1
PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-}
PEERS=${PEERS:-}
TORCH=${TORCH:-}
log=.venv/setup.log

die() { echo "ringlab: $*" >&2; exit 1; }

version=$($PYTHON -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
    die "'$PYTHON' is not a working Python; name one: make PYTHON=/path/to/python3.11"
$PYTHON -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "Python 3.11 or newer is needed, '$PYTHON' is $version; name another: make PYTHON=/path/to/python3.11"
$PYTHON -c 'import venv, ensurepip' 2>/dev/null ||
    die "'$PYTHON' has no venv module; install it (Debian, Ubuntu: apt install python3-venv) or name another Python: make PYTHON=..."

# CUDA 13 builds of torch hold no kernels below compute capability 7.5; the CUDA 12.6 build still does.
if [ -z "$TORCH_INDEX" ] && command -v nvidia-smi >/dev/null 2>&1; then
    oldest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d ' \r' | grep -E '^[0-9]+\.[0-9]+$' | sort -n | head -n 1) || true
    case $oldest in
        [1-6].* | 7.[0-4])
            TORCH_INDEX=cu126
            echo "ringlab: this GPU has compute capability $oldest, so torch comes as its CUDA 12.6 build (TORCH_INDEX=cu126)" ;;
    esac
fi

if [ "$TORCH" = newest ] && [ -n "$TORCH_INDEX" ]; then
    die "the newest torch comes from PyPI; with TORCH_INDEX=$TORCH_INDEX name its version, as TORCH=2.13.0"
fi

if ls .venv/.ready-* >/dev/null 2>&1; then
    echo "ringlab: bringing .venv up to date (log in $log)"
else
    echo "ringlab: setting up .venv with Python $version (about 2 minutes, once; log in $log)"
fi
# A log without a stamp is a set-up that did not finish: start again from nothing. Another .venv is kept and added to.
clear=
if [ -e "$log" ] && ! ls .venv/.ready-* >/dev/null 2>&1; then clear=--clear; fi
.venv/bin/python -c pass 2>/dev/null || clear=--clear
# What is there stays as it was, and so does its stamp, until the build of torch that was asked for is known to exist.
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
mv .venv/.ready-* "$before" 2>/dev/null || true
failure=$($PYTHON -m venv $clear .venv 2>&1) || { rm -rf .venv; die "'$PYTHON -m venv .venv' failed: $(echo "$failure" | tail -n 1)"; }
: >"$log"

# Of pip's variables those stay that say where packages come from. Others say where they go, as a cluster's PIP_PREFIX.
for name in $(env | sed -n 's/^\(PIP_[A-Z0-9_]*\)=.*/\1/p'); do
    case $name in
        PIP_*INDEX* | PIP_FIND_LINKS | PIP_CON* | PIP_*CERT | PIP_PROXY | PIP_*HOST | PIP_*CACHE_DIR | PIP_*TIMEOUT | PIP_RETRIES | PIP_KEYRING*) ;;
        *) unset "$name" ;;
    esac
done
# With a torch of the caller's choice the pins give way that hold for one torch alone.
pins=.venv/constraints.txt
grep -vE "^(${TORCH:+torch|triton|xformers|setuptools})==" lib/constraints.txt >"$pins"
# Byte code is written on first import instead of for all packages: set-up halves.
pip() { .venv/bin/python -m pip "$@" --no-compile --no-input --disable-pip-version-check --progress-bar off -c "$pins" >>"$log" 2>&1; }
fail() {
    grep -v '^WARNING' "$log" | tail -n 12 >&2
    die "set-up failed${1:+: $1}; the whole log is $log"
}

url=https://download.pytorch.org/whl/$TORCH_INDEX
torch=torch==${TORCH:-$(sed -n 's/^torch==//p' lib/constraints.txt)}${TORCH_INDEX:++$TORCH_INDEX}
if [ "$TORCH" = newest ]; then torch=torch; fi
if [ -n "$TORCH$TORCH_INDEX" ]; then
    pip install --upgrade ${TORCH_INDEX:+--extra-index-url "$url"} "$torch" || {
        mv "$before"/.ready-* .venv/ 2>/dev/null || true
        fail "$torch is not to be had${TORCH_INDEX:+ from $url}"
    }
fi
if [ -n "$TORCH_INDEX" ]; then
    # PyPI's xformers fits CUDA 12 alone; take the build that matches torch where that index has one.
    case $TORCH_INDEX in cu*) pip install --no-deps --index-url "$url" xformers || echo "ringlab: no xformers on $url; PyPI's is used" >>"$log" ;; esac
fi
pip install -e './lib[report,lab,gpu,transformers,test]' || fail
if [ -n "$PEERS" ]; then
    pip install -e './lib[peers]' || fail
    # These require old versions of torch's companions. No release of torchscale has DilatedAttention: it comes from git.
    pip install --no-deps dilated-attention-pytorch || fail
    pip install --no-deps git+https://github.com/microsoft/torchscale@4d1e0e82e5adf86dd424f1463192635b73fc8efc ||
        echo "ringlab: torchscale cannot be installed from GitHub (log in $log); the report lists it as absent"
fi
.venv/bin/python -I -c 'import ringlab, torch' >>"$log" 2>&1 || fail "what pip installed cannot be imported; 'pip config list' tells where it put it"
echo "$TORCH_INDEX${PEERS:+ $PEERS}${TORCH:+ $TORCH}" >"$stamp"

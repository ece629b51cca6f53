#!/usr/bin/env bash
# What a GPU can show, for a machine with torch, Triton and pytest-xdist: the matrix on CUDA in two minutes, then every
# suite in about twenty. Rows are appended as they come, and the next run goes on where this one stopped:
#
#   tests/gpu/measure.sh            all of it
#   tests/gpu/measure.sh tests      the matrix alone
#   tests/gpu/measure.sh rows 9     rows alone; no group is begun after nine minutes
#
# Rows go to $DATA (reports/<profile>/data). Then, there or wherever they are brought: make report GPU=<profile>
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/lib${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
part=${1:-all}

if [ "$part" != rows ]; then  # a thread each: sixteen processes share the cores
    OMP_NUM_THREADS=1 "$python" -m pytest tests/gpu/test_cuda.py -q -n "${WORKERS:-14}" -p no:cacheprovider
fi
if [ "$part" != tests ]; then
    for suite in kernels landscape session_summary optimization performance_comparison benchmark_summary hybrid_summary; do
        left=$((${2:-60} * 60 - SECONDS))
        [ "$left" -gt 0 ] || { echo "${2:-60} minutes are over; run again to go on"; break; }
        "$python" -m ringlab measure --suite "$suite" --minutes "$(awk "BEGIN { print $left / 60 }")" ${DATA:+--data "$DATA"}
    done
fi

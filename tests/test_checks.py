"""The checks that rooms share: what each takes, and one clear line for all else."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ringlab import Dense, checks, estimate

PACKAGE = Path(checks.__file__).parent


def one_line(call, *arguments, **more) -> str:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as failure:
        call(*arguments, **more)
    assert "\n" not in str(failure.value) and len(str(failure.value)) < 400
    return str(failure.value)


@pytest.mark.parametrize(
    "value", [None, "x", "1", 1.0, -1, True, 2**41, [], np.array([1, 2]), torch.ones(3, 3), torch.float32, object()]
)
def test_what_is_no_such_value_is_one_line(value):
    assert one_line(checks.positive, "n", value, most=checks.LARGEST).startswith(
        "n must be a positive integer up to 2**40, got "
    )
    assert one_line(checks.known, "way", value, ("a", "b")).endswith("; known: a, b")
    if value is not True:
        assert one_line(checks.flag, "switch", value).startswith("switch must be True or False, got ")
    if value is not torch.float32:
        assert one_line(checks.float_dtype, value).startswith("dtype must be float64, float32, bfloat16 or float16")


def test_what_fits_is_taken():
    assert checks.positive("n", 3) == 3 and checks.positive("seed", 0, 0) == 0 and checks.positive("n", 2**41) == 2**41
    assert checks.whole(1) and checks.whole(0, 0) and checks.real(-1.5) and not checks.real(True)
    checks.known("way", "a", ("a", "b"))
    checks.flag("switch", False)
    for dtype in checks.FLOATS:
        checks.float_dtype(dtype)


def test_a_length_beyond_any_sequence_is_refused_for_what_it_is():
    assert one_line(estimate, Dense(), seq_len=2**41).endswith(f"integer up to 2**40, got {2**41}")


def test_integers_are_told_from_truth_in_one_place():
    own = re.compile(r"isinstance\(\w+, bool\) or not isinstance")
    rooms = [path for path in PACKAGE.glob("**/*.py") if path.parent.name not in ("report", "explore", "measure")]
    assert [path.name for path in rooms if own.search(path.read_text())] == []

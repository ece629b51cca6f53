"""Predictions beside rows that were measured."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ringlab import cli, measure
from ringlab.hardware import Rates, get_profile
from ringlab.kernels import torch_kernels
from ringlab.report import predicted
from ringlab.report.study import Study, rates_of

DATA = Path(__file__).parent / "recorded"  # rows of reports/cpu/data, one of each kind
OPERATORS, BLOCKS = (
    1000,
    256,
)  # a few rows of more calls, or longer plans, take seconds each


@pytest.fixture(scope="module")
def known():
    rows = [
        r
        for r in measure.load(DATA)
        if r.status == "ok"
        and r.memory.get("tracked_peak_bytes")
        and r.memory.get("operator_calls", 0) <= OPERATORS
        and r.point.seq_len // r.point.pattern.get("block_size", r.point.seq_len)
        <= BLOCKS
    ]
    assert len(rows) > 40
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # the CPU of the rows has no products in half precision, this one may
        patch.setattr(torch_kernels, "has_half_units", lambda dtype: False)
        return predicted.predict(rows)


def test_every_peak_within_5_percent_and_never_below_and_bytes_exact(known):
    for row, found in known:
        label, tracked = row.point.label(), row.memory["tracked_peak_bytes"]
        # Other versions of torch than that of the rows differ by single bytes.
        assert tracked - 8 <= found.peak_bytes <= 1.05 * tracked, label
        if row.point.world_size > 1:
            assert found.sent_by_rank == row.ranks["bytes_sent"], label
    assert {row.point.world_size for row, _ in known} >= {1, 2, 4}
    assert len(known) > 20 and len({row.point.system for row, _ in known}) > 6


def test_rates_come_from_the_rows_own_bounds_and_no_time_is_below_theirs(known):
    bounded = [(row, found) for row, found in known if row.bound_seconds]
    for dtype in (dtypes := {row.point.dtype for row, _ in bounded}):
        mine = [(row, found) for row, found in bounded if row.point.dtype == dtype]
        rates = rates_of([row for row, _ in mine])
        for row, found in mine:
            share = [
                rate and rate / found.ranks
                for rate in (rates.flops_per_s, rates.bytes_per_s)
            ]
            bound, label = found.bounded(Rates(*share)).bound_s, row.point.label()
            assert bound <= row.bound_seconds * (1 + 1e-9), label
            assert not row.median or bound <= row.median, label
    assert len(bounded) > 10 and "float32" in dtypes
    binding = [row for row, _ in bounded if row.point.dtype == "float32"]
    slower = rates_of([replace(r, bound_seconds=2 * r.bound_seconds) for r in binding])
    assert slower.flops_per_s == pytest.approx(rates_of(binding).flops_per_s / 2)


def test_the_sentence_of_a_report(known):
    rows = [row for row, _ in known if row.group in ("implementations", "schemes")][:12]
    off = replace(
        rows[0],
        memory=rows[0].memory
        | {"tracked_peak_bytes": 2 * rows[0].memory["tracked_peak_bytes"]},
    )
    said, of_both = (
        predicted.accuracy(Study(get_profile("cpu"), some, DATA)).markdown
        for some in (rows, [off, *rows[1:]])
    )
    count = int(re.search(r"predicts (\d+) of", said)[1])
    assert (
        count > 5
        and f"predicts {count} of {count} peaks" in said
        and "not of" not in said
    )
    assert f"predicts {count - 1} of {count} peaks" in of_both and "-50.0 %" in of_both
    assert f"not of {off.point.system}, " in of_both
    none = Study(get_profile("cpu"), [], DATA)
    assert predicted.accuracy(none).markdown == ""


def test_the_command_line(capsys):
    assert (
        cli.main(
            ["estimate", "--profile", "gtx1080", "--ranks", "2", "--seq-len", "131072"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "547.5 MiB a rank, which fits 8 GiB\n" in said
        and "at least 38.7 ms, by compute" in said
    )
    assert "longest" not in said  # many runs without data, only where a memory is given
    assert cli.main(["estimate", "--profile", "gtx1080", "--memory", "8GiB"]) == 0
    assert "longest    1,010,304 tokens in 8 GiB a rank" in capsys.readouterr().out
    asked = "--pattern dense --ranks 2 --seq-len 4096 --scheme ring --memory 16MiB"
    assert cli.main(["estimate", "--profile", "gtx1080", *asked.split()]) == 0
    said = capsys.readouterr().out
    assert " 0 to 1 " in said and "which does not fit 16 MiB" in said


@pytest.mark.parametrize(
    "given, why",
    [
        (["--memory", "10KiB"], "more than the 10,240 there are"),
        (["--pattern", "dens"], "unknown pattern 'dens'"),
        (["--pattern", "{"], "Expecting"),
        (["--memory", "0KB", "--seq-len", "64"], "in bytes must be a positive"),
        (
            ["--pattern", '{"kind": "dense"}', "--segment-lengths", "5"],
            "--segment-lengths needs a --pattern by name: dilated, dense, ladder",
        ),
        (["--pattern", "dense", "--block-size", "5"], "'dense' takes no block_size"),
        (["--pattern", "ladder"], "'ladder' needs a length"),
        (
            ["--pattern", '{"kind":"block_sparse","block_size":64,"parts":[5]}'],
            "is no pattern's to_dict()",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, given, why):
    assert cli.main(["estimate", "--profile", "gtx1080", *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and why in err


def test_other_threads_of_torch_are_those_of_that_call_alone():
    before = torch.get_num_threads()
    for threads in (1, before + 3, None):
        with predicted.with_threads(threads):
            assert torch.get_num_threads() == (threads or before)
        assert torch.get_num_threads() == before
    with ThreadPoolExecutor(1) as new:
        assert new.submit(torch.get_num_threads).result() == before
    with pytest.raises(ValueError), predicted.with_threads(before + 1):
        raise ValueError
    assert torch.get_num_threads() == before

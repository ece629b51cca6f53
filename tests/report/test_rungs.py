"""The appendix on kernels from made-up rows of an H200: figures and causes that follow
the rows.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reporting import (
    made_up,
    notebook,
    run_in_this_process,
    sampled,
    study_of,
    two_points,
    write_rows,
)
from ringlab import cli, hardware
from ringlab.kernels.triton_config import Sizes, Use
from ringlab.kernels.triton_tune import Timed
from ringlab.measure import suites as suite
from ringlab.report import driver, rungs
from ringlab.report.study import Study, cost_of
from ringlab.report.tables import number

# Useful TFLOP/s of each way, so that what follows from them can be worked out by hand.
RATES = {
    "default": 600,
    "lists": 580,
    "fused": 590,
    "strided": 520,
    "copying": 260,
    "cudnn": 640,
    "flash": 360,
    "dense_sdpa": 690,
    "flex": 400,
}


def way_of(point) -> str:
    options = dict(point.options)
    if point.system == "contiguous_segments":
        return options["backend"]
    names = {str(o): name for name, o in suite.RUNG_WAYS.items()}
    return (
        names.get(str(options), "default")
        if point.system == "ringlab"
        else point.system
    )


def on_gpu(point, group, rate: float | None = None, noise: float = 0.0):
    """An ok row of a GPU whose useful work ran at ``rate`` TFLOP/s, every other sample
    slower by ``noise``.
    """
    row = made_up(point.but(options={}), replace(group, timed=True), False, rounds=1)
    work = cost_of(
        point.but(pattern={"kind": "dense"}) if point.system == "dense_sdpa" else point
    )
    flops = (
        work.flops / 1.75 if point.system == "contiguous_segments" else work.flops
    )  # of three branches the first
    taken = tuple(
        flops / (rate or RATES[way_of(point)]) / 1e12 * (1 + noise * (i % 2))
        for i in range(10)
    )
    where = row.provenance | {
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "device_memory_bytes": 150_000_000_000,
    }
    held = {
        "floor_bytes": work.floor_bytes,
        "tracked_peak_bytes": int(1.02 * work.floor_bytes),
        "allocator_peak_bytes": int(1.05 * work.floor_bytes),
        "operator_calls": {"lists": 3, "fused": 20}.get(way_of(point), 40),
    }
    return sampled(
        row,
        taken,
        point=point,
        composition=group.composition(point),
        provenance=where,
        memory=held,
        share=None,
        errors=dict.fromkeys(row.errors, 2e-3),
        tolerance=dict.fromkeys(row.errors, 4e-3),
        cost={"flops": flops},
        bound_seconds=0.5 * taken[0],
    )


def rows_of(name: str = "h200", groups=slice(None)) -> list:
    groups = suite.kernel_suite(hardware.get_profile(name), device="cuda")[groups]
    return [on_gpu(p, g) for g in groups for p in g.points]


def of_kernels(results, name: str = "h200") -> Study:
    return study_of(results, name, suite="kernels")


def column(table, name: str) -> dict[tuple, str]:
    """The texts of a column, by way, tokens, head_dim, pattern and pass."""
    at = [c.lstrip(">") for c in table.columns].index(name)
    texts = [[getattr(x, "text", x) for x in row] for row in table.rows]
    return {tuple(row[:5]): row[at] for row in texts}


def shares(results, name: str = "h200") -> dict[tuple, str]:
    return column(rungs.times(of_kernels(results, name)), "Of the best peer")


@pytest.fixture(scope="module")
def whole() -> list:
    return rows_of()


def changed(results, test, **how):
    """The rows with those that pass a test at another rate, or with other fields."""
    groups = {
        g.name: g
        for g in suite.kernel_suite(hardware.get_profile("h200"), device="cuda")
    }
    fields = {k: how.pop(k) for k in [*how] if k not in ("rate", "noise")}
    found = [
        on_gpu(r.point, groups[r.group], **how) if how and test(r) else r
        for r in results
    ]
    return [replace(r, **fields) if test(r) else r for r in found]


def is_default(passes="fwd", seq_len=65536, head_dim=128, causal=False, kind="dilated"):
    def test(r):
        p = r.point
        shape = (p.passes, p.seq_len, p.head_dim, p.causal, p.pattern["kind"])
        same = shape == (passes, seq_len, head_dim, causal, kind)
        return same and p.system == "ringlab" and dict(p.options) in ({}, suite.TWIN)

    return test


DEFAULT = "Default path", 65536, 128, "dilated", "forward"


def test_each_way_stands_with_its_time_its_roofline_and_its_share_of_the_best_peer(
    whole,
):
    table = rungs.times(of_kernels(whole))
    found = shares(whole)
    assert len(table.rows) == len(whole) - 1  # but for the twin
    lists = ("Tile lists (Triton)", *DEFAULT[1:])
    assert column(table, "Useful TFLOP/s")[lists] == "580"
    assert column(table, "Operator calls")[lists] == 3
    for d in (128, 64):
        for name in suite.RUNG_PASSES:
            assert (
                found["Default path", 65536, d, "dilated", name] == "93.8 %"
            )  # 600 / 640
    assert found["Tile lists (Triton)", *DEFAULT[1:]] == "90.6 %"
    assert found["FlexAttention", 65536, 128, "block-sparse", "forward"] is None
    assert (
        found["Default path", 65536, 128, "block-sparse", "forward"] == "150 %"
    )  # 600 / 400
    assert (
        found["Dense SDPA", 65536, 128, "dense", "forward"]
        is found["Default path", 1048576, *DEFAULT[2:]]
        is None
    )
    row = next(r for r in whole if is_default()(r))
    assert column(table, "Time (ms)")[DEFAULT] == number(row.median * 1e3)
    assert column(table, "Roofline (ms)")[DEFAULT] == number(row.bound_seconds * 1e3)
    assert (
        {key[1] for key in found} == {16384, 65536, 262144, 1048576}
        and table.html
        and table.markdown
    )


def test_a_share_follows_the_row_and_its_peers(whole):
    slow = shares(changed(whole, is_default(), rate=500))
    assert slow[DEFAULT] == "78.1 %" and slow[*DEFAULT[:4], "causal"] == "93.8 %"
    faster = shares(
        changed(
            whole, lambda r: dict(r.point.options).get("backend") == "flash", rate=800
        )
    )
    assert faster["Default path", 65536, 64, "dilated", "forward"] == "75.0 %", (
        "of the best of the peers"
    )
    unsure = rungs.times(of_kernels(changed(whole, is_default(), rate=560, noise=0.1)))
    cell = next(row[7] for row in unsure.rows if (row[0].text, *row[1:5]) == DEFAULT)
    low, high = map(float, cell.sub.split(" to "))
    assert low < float(cell.text[:-2]) < high


def test_rows_that_may_not_be_quoted_say_why(whole):
    gone = {
        "status": "oom",
        "reason": "CUDA out of memory",
        "median": None,
        "seconds": (),
        "ci": None,
    }
    lost = of_kernels(changed(whole, is_default(), **gone))
    table = rungs.times(lost)
    assert (
        column(table, "Time (ms)")[DEFAULT] == "oom"
        and column(table, "Of the best peer")[DEFAULT] is None
    )
    assert column(table, "Useful TFLOP/s")[DEFAULT] is None
    assert [(row[2].text, row[3]) for row in rungs.rejected(lost).rows] == [
        ("oom", "CUDA out of memory")
    ]
    assert rungs.rejected(of_kernels(whole)) is None
    fewer = of_kernels([r for r in whole if r.point.system != "flex"])
    assert "Not measured: 1 points, as " in rungs.times(fewer).note


def test_points_that_were_not_measured_are_counted():
    table = rungs.times(of_kernels(rows_of("a100", slice(1)), "a100"))
    assert "Not measured: 58 points, as r" in table.note


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_without_rows_there_is_no_appendix(whole, name):
    study = of_kernels(
        [replace(whole[0], group="implementations")] if name == "h200" else [], name
    )
    assert [f(study) for f in (rungs.times, rungs.tuned, rungs.rejected)] == [None] * 3


def test_the_appendix_shows_all_of_it_from_stored_rows_or_nothing(whole, tmp_path):
    source = notebook(
        tmp_path / "page.ipynb",
        "from ringlab.report import rungs\n\nrungs.appendix('h200', data)",
    )
    others = [made_up(p, g, False) for g in two_points() for p in g.points]
    for name, rows, shown in (("kernels", whole[:9], 2), ("none", others, 0)):
        write_rows(tmp_path / name, rows)
        cell = run_in_this_process(source, None, {"data": str(tmp_path / name)}).cells[
            -1
        ]
        assert len(cell.outputs) == shown


def test_the_report_measures_the_kernels_too_where_there_is_a_gpu():
    pages = [Path("optimization_results.ipynb")]
    for name, device, more in (("h200", "cuda", 12), ("cpu", "cpu", 0)):
        profile = hardware.get_profile(name)
        asked = driver._suite(pages)(profile, device=device, rehearsal=False)
        assert len(asked) == len(suite.optimization(profile, device=device)) + more
        every = driver._suite([Path("claims.ipynb")])(
            profile, device=device, rehearsal=False
        )
        assert {g.name for g in asked} < {g.name for g in every}
        assert len(every) == sum(
            len(make(profile, device=device)) for make in suite.SUITES.values()
        )


def test_what_tuning_timed_is_shown_beside_each_other(tmp_path):
    use = Use.of("forward", 128, torch.bfloat16, False, False, 1)
    plain, by_hand = Sizes(128, 64, 8, 2), Sizes(128, 128, 4, 2, "gluon")
    found = Timed(
        use,
        plain,
        {plain: 0.004, by_hand: 0.002},
        {Sizes(64, 64, 8, 2): "wrong result: off by 1"},
    )
    shape = {
        "pattern": suite.RUNG_PATTERN.to_dict(),
        "seq_len": 16384,
        "batch": 1,
        "heads": 16,
        "kv_heads": 16,
    }
    study = Study(hardware.get_profile("h200"), [], tmp_path / "data", suite="kernels")
    assert rungs.tuned(study) is None
    cli.record([found], shape, tmp_path / "data", torch.device("cpu"))
    table = rungs.tuned(study)
    shown = [[getattr(cell, "text", cell) for cell in row] for row in table.rows]
    assert [row[1:] for row in shown] == [
        ["128 × 128, 4, 2, gluon", "2.00", "2.00×", "kept"],
        ["128 × 64, 8, 2, pointers", "4.00", "1.00×", "the default"],
        ["64 × 64, 8, 2, pointers", "refused", None, "wrong result: off by 1"],
    ]
    assert table.note.startswith(f"interpreter, torch {torch.__version__}, triton ")

"""The appendix on kernels from made-up rows of an H200: figures, causes, and verdicts that follow the rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reporting import made_up, sampled, study_of
from ringlab import cli, hardware
from ringlab.kernels.triton_config import Sizes, Use
from ringlab.kernels.triton_tune import Timed
from ringlab.measure import suites as suite
from ringlab.report import driver, rung_rows, rungs
from ringlab.report.study import Study, cost_of

# Useful TFLOP/s of each way, so that what follows from them can be worked out by hand.
RATES = {"default": 600, "lists": 580, "fused": 590, "strided": 520, "copying": 260, "cudnn": 640, "flash": 360,
         "dense_sdpa": 690, "flex": 400}  # fmt: skip


def way_of(point) -> str:
    options = dict(point.options)
    if point.system == "contiguous_segments":
        return options["backend"]
    names = {str(o): name for name, o in suite.RUNG_WAYS.items()}
    return names.get(str(options), "default") if point.system == "ringlab" else point.system


def on_gpu(point, group, rate: float | None = None, noise: float = 0.0):
    """An ok row of a GPU whose useful work ran at ``rate`` TFLOP/s, every other sample slower by ``noise``."""
    row = made_up(point.but(options={}), replace(group, timed=True), False, rounds=1)
    work = cost_of(point.but(pattern={"kind": "dense"}) if point.system == "dense_sdpa" else point)
    flops = work.flops / 1.75 if point.system == "contiguous_segments" else work.flops  # of three branches the first
    taken = tuple(flops / (rate or RATES[way_of(point)]) / 1e12 * (1 + noise * (i % 2)) for i in range(10))
    where = row.provenance | {"device": "cuda", "device_name": "NVIDIA H200", "device_memory_bytes": 150_000_000_000}
    held = {"floor_bytes": work.floor_bytes, "tracked_peak_bytes": int(1.02 * work.floor_bytes),
            "allocator_peak_bytes": int(1.05 * work.floor_bytes),
            "operator_calls": {"lists": 3, "fused": 20}.get(way_of(point), 40)}  # fmt: skip
    return sampled(
        row, taken, point=point, composition=group.composition(point), provenance=where, memory=held, share=None,
        errors=dict.fromkeys(row.errors, 2e-3), tolerance=dict.fromkeys(row.errors, 4e-3), cost={"flops": flops},
        bound_seconds=0.5 * taken[0],
    )  # fmt: skip


def rows_of(name: str = "h200", groups=slice(None)) -> list:
    groups = suite.kernel_suite(hardware.get_profile(name), device="cuda")[groups]
    return [on_gpu(p, g) for g in groups for p in g.points]


def of_kernels(results, name: str = "h200") -> Study:
    return study_of(results, name, suite="kernels")


def verdicts(results, name: str = "h200") -> dict[str, tuple[str, str]]:
    """By the words of a target: (figure, verdict)."""
    return {row[0]: (row[2].text, row[3].text) for row in rungs.targets(of_kernels(results, name)).rows}


@pytest.fixture(scope="module")
def whole() -> list:
    return rows_of()


def changed(results, test, **how):
    """The rows with those that pass a test at another rate, or with other fields."""
    groups = {g.name: g for g in suite.kernel_suite(hardware.get_profile("h200"), device="cuda")}
    fields = {k: how.pop(k) for k in [*how] if k not in ("rate", "noise")}
    found = [on_gpu(r.point, groups[r.group], **how) if how and test(r) else r for r in results]
    return [replace(r, **fields) if test(r) else r for r in found]


def is_default(passes="fwd", seq_len=65536, head_dim=128, causal=False, kind="dilated"):
    def test(r):
        p = r.point
        shape = (p.passes, p.seq_len, p.head_dim, p.causal, p.pattern["kind"])
        same = shape == (passes, seq_len, head_dim, causal, kind)
        return same and p.system == "ringlab" and dict(p.options) in ({}, suite.TWIN)

    return test


LONGEST = "Peak memory of the longest training step, of its tensors"
WORST = "Largest error, of twice that of one dense call"
SHARE = "Of the best peer's rate, {}, head_dim {}"


def test_targets_are_met_or_missed_by_the_rows(whole):
    found = verdicts(whole)
    for d in (128, 64):
        for name in suite.RUNG_PASSES:
            assert found[SHARE.format(name, d)] == ("93.8 %", "met")
    assert found["Useful work, forward, head_dim 128"] == ("600 TFLOP/s", "missed")
    assert found["Useful work, forward and backward, head_dim 128"] == ("600 TFLOP/s", "met")
    for n in ("16,384", "65,536", "262,144", "1,048,576"):
        assert found[f"Faster than the copying form, {n} tokens"] == ("2.31×", "met")
    assert found["Faster than strided views with eager merges"] == ("1.15×", "met")
    assert found["Blocks: time over dense time times density"] == ("1.15×", "met")  # 690 / 600
    assert found["Blocks: time over FlexAttention's"] == ("0.667×", "met")
    assert found[LONGEST] == ("1.05×", "met") and found[WORST] == ("50.0 %", "met")
    assert len(found) == len(rung_rows.data()["targets"])


def test_a_verdict_follows_the_row_that_it_rests_on(whole):
    slow = verdicts(changed(whole, is_default(), rate=500))
    assert slow[SHARE.format("forward", 128)] == ("78.1 %", "missed")
    assert slow["Faster than the copying form, 65,536 tokens"] == ("1.92×", "missed")
    assert slow["Faster than strided views with eager merges"] == ("0.962×", "missed")
    assert slow[SHARE.format("causal", 128)][1] == slow["Faster than the copying form, 16,384 tokens"][1] == "met"
    unsure = verdicts(changed(whole, is_default(), rate=560, noise=0.1))
    assert unsure[SHARE.format("forward", 128)][1] == "not told"
    faster = changed(whole, lambda r: dict(r.point.options).get("backend") == "flash", rate=800)
    assert verdicts(faster)[SHARE.format("forward", 64)] == ("75.0 %", "missed"), "the best of the peers"
    blocks = verdicts(changed(whole, is_default(kind="block_sparse"), rate=390))
    assert blocks["Blocks: time over dense time times density"] == ("1.77×", "missed")
    assert blocks["Blocks: time over FlexAttention's"] == ("1.03×", "missed")


def test_memory_errors_and_rows_that_may_not_be_quoted(whole):
    longest = is_default("fwd+bwd", 1_048_576)
    row = next(r for r in whole if longest(r))
    large = row.memory | {"allocator_peak_bytes": int(1.3 * row.memory["floor_bytes"])}
    assert verdicts(changed(whole, longest, memory=large))[LONGEST] == ("1.30×", "missed")
    found = verdicts(changed(whole, longest, errors=dict.fromkeys(row.errors, 5e-3)))
    assert found[WORST] == ("125 %", "missed") and found[LONGEST] == ("incorrect", "open")
    lost = changed(whole, is_default(), status="oom", reason="CUDA out of memory", median=None, seconds=(), ci=None)
    assert verdicts(lost)[SHARE.format("forward", 128)] == ("oom", "open")
    assert [row[1].text for row in rungs.unquoted(of_kernels(lost)).rows] == ["oom", "oom"]  # it stands there twice
    found = verdicts([r for r in whole if r.point.system != "flex" and not longest(r)])
    assert found["Blocks: time over FlexAttention's"] == ("nothing to hold it against", "open")
    assert found[LONGEST] == ("not measured", "open")


def test_versions_stand_beside_their_prediction_and_cause(whole):
    study = of_kernels(whole)
    table = rungs.versions(study)
    by = {(row[0], row[1]): dict(zip([c.lstrip(">") for c in table.columns], row)) for row in table.rows}
    assert len(by) == len(table.rows) == 6 * 7 + 2  # dense attention in two of the passes
    lists = by["Tile lists (Triton)", "forward, head_dim 128"]
    assert lists["Predicted (TFLOP/s)"] == "550 to 620" and lists["Measured (TFLOP/s)"].text == "580"
    assert lists["Of the best peer"].text == "90.6 %"
    eager = "torch's kernels on strided views, eager merges"
    for system, name, cause in (
        ("Tile lists (Triton)", "forward, head_dim 128", "0.786 of the useful products, 1.07 GB at least, 3 operator"),
        ("Tile lists (Triton)", "causal, head_dim 128", "0.928 of"),
        ("Tile lists (Triton)", "forward and backward, head_dim 64", "1.010 of the useful products, 3 "),  # 18 / 14
        (eager, "forward, head_dim 128", "1.000 of the useful products, 2.48 GB at least, 40 operator calls, a call"),
    ):
        assert by[system, name]["Cause"].startswith(cause)
    cause = by["Default path", "forward, head_dim 128"]["Cause"]
    assert cause.endswith(f"2.48 GB at least, 40 operator calls, as {eager}")
    few = changed(whole, is_default(), memory=next(r for r in whole if r.option("backend") == "triton").memory)
    row = next(row for row in rungs.versions(of_kernels(few)).rows if row[0] == "Default path")
    assert row[-1].endswith("as Tile lists (Triton)"), "by the operator calls"
    assert by["cuDNN, contiguous segments", "causal, head_dim 128"]["Predicted (TFLOP/s)"] == "484"
    assert by["Dense SDPA", "forward, head_dim 128"]["Of the best peer"] is None
    shown = [f(study) for f in (rungs.lengths, rungs.blocks, rungs.memory, rungs.sources)]
    assert [len(t.rows) for t in shown[:3]] == [4, 5, 3] and "cuDNN 9.19 on H200" in shown[3].markdown
    assert all(t.html and t.markdown for t in shown) and rungs.unquoted(study) is None


def test_another_gpu_has_no_predictions_and_no_absolute_targets():
    rows = rows_of("a100", slice(1))
    study = of_kernels(rows, "a100")
    assert {row[2] for row in rungs.versions(study).rows} == {None}
    assert not [words for words in verdicts(rows, "a100") if words.startswith("Useful work")]
    assert [line[:29] for line in rungs.sources(study).lines] == ["Not measured: 58 points, as r"]


@pytest.mark.parametrize("name, rows, said", [
    ("cpu", [], "these rows come from a CPU"),
    ("h200", None, "`python -m ringlab measure --profile h200 --suite kernels`"),
])  # fmt: skip
def test_without_rows_one_sentence_says_why(whole, name, rows, said):
    study = of_kernels([replace(whole[0], group="implementations")] if rows is None else rows, name)
    assert said in rungs.versions(study).markdown
    rest = (rungs.targets, rungs.lengths, rungs.blocks, rungs.memory, rungs.sources, rungs.unquoted)
    assert [f(study) for f in rest] == [None] * 6


def test_the_report_measures_the_kernels_too_where_there_is_a_gpu():
    pages = [Path("optimization_results.ipynb")]
    for name, device, more in (("h200", "cuda", 12), ("cpu", "cpu", 0)):
        profile = hardware.get_profile(name)
        asked = driver._suite(pages)(profile, device=device, rehearsal=False)
        assert len(asked) == len(suite.optimization(profile, device=device)) + more
        every = driver._suite([Path("claims.ipynb")])(profile, device=device, rehearsal=False)
        assert {g.name for g in asked} < {g.name for g in every}
        assert len(every) == sum(len(make(profile, device=device)) for make in suite.SUITES.values())


def test_what_tuning_timed_is_shown_beside_each_other(tmp_path):
    use = Use.of("forward", 128, torch.bfloat16, False, False, 1)
    plain, by_hand = Sizes(128, 64, 8, 2), Sizes(128, 128, 4, 2, "persistent")
    found = Timed(use, plain, {plain: 0.004, by_hand: 0.002}, {Sizes(128, 128, 4, 2, "gluon"): "hangs: a first run"})
    shape = {"pattern": suite.RUNG_PATTERN.to_dict(), "seq_len": 16384, "batch": 1, "heads": 16, "kv_heads": 16}
    study = Study(hardware.get_profile("h200"), [], tmp_path / "data", suite="kernels")
    assert rungs.tuned(study) is None
    cli.record([found], shape, tmp_path / "data", torch.device("cpu"))
    table = rungs.tuned(study)
    work = 16 * 4 * 128 * sum(16384 * w // r**2 for w, r in ((2048, 1), (4096, 2), (8192, 4)))
    shown = [[getattr(cell, "text", cell) for cell in row] for row in table.rows]
    assert [row[1:4] for row in shown] == [
        ["Gluon, programs that stay", "128 × 128, 4, 2", "2.00"], ["pointers", "128 × 64, 8, 2", "4.00"],
        ["Gluon, a program for each tile", "128 × 128, 4, 2", "refused"],
    ]  # fmt: skip
    assert [row[7] for row in shown] == ["kept", "the default", "hangs: a first run"]
    assert float(shown[0][5]) == pytest.approx(work / 0.002 / 1e12, rel=0.01) and shown[0][6] == "2.00×"
    assert [row[4] for row in shown] == ["700 to 780", None, None]
    assert table.note.startswith(f"interpreter, torch {torch.__version__}, triton ")

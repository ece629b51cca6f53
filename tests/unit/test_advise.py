"""Advice runs, moves the fewest bytes, agrees with the estimate and follows the rows."""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import Mock

import pytest
import ringlab
import torch
from reporting import made, made_up, study_of
from ringlab import Dense, Dilated, Evidence, advise, cache_bytes, cli, hardware
from ringlab.advise import keys_of, local
from ringlab.block_patterns import sliding_window
from ringlab.call import CallSpec
from ringlab.checks import parse_count
from ringlab.cost import far_queries, format_bytes, format_seconds
from ringlab.estimate import estimate, longest
from ringlab.measure import suites
from ringlab.presets import ladder
from ringlab.report.evidence import choosing, evidence, learned, stored
from ringlab.ring import SCHEMES, Problem, contiguous, zigzag
from ringlab.ring.layout import layout_named
from ringlab.ring.volume import sent_bytes, unevenness

GTX, SMALL = hardware.get_profile("gtx1080"), dict(heads=4, head_dim=16)
LADDER = Dilated([12, 36], [1, 2])


@pytest.mark.parametrize("name", hardware.profiles())
def test_the_code_compiles_and_runs_at_a_reduced_length(name, capsys):
    shape = dict(heads=2, head_dim=16, passes="fwd+bwd")
    for ranks, n, need in ((1, 131072, "local"), (2, 8192, "far"), (1, 2**22, "far")):
        advice = advise(name, n, ranks=ranks, need=need, estimates=False, **shape)
        assert f"\nseq_len = {n}\n" in advice.code() and advice.fits is None
        torch.manual_seed(0)
        names: dict = {}
        exec(advice.code().replace(f"seq_len = {n}", "seq_len = 260"), names)
        size, shape_of_out = capsys.readouterr().out.splitlines()
        x, out = (names[name].detach().cpu() for name in ("x", "out"))
        assert size == f"{n:,} tokens"
        assert shape_of_out == "(1, 260, 2, 16)" == str((*out.shape,))
        assert out.dtype == advice["dtype"]
        assert torch.isfinite(names["x"].grad).all()
        pattern = advice.advised.pattern
        if advice.advised.dense_every:
            assert names["layers"] == [Dense(), pattern, pattern, pattern]
        for pattern in names["layers"]:
            x, _ = ringlab.reference.attention(x, x, x, pattern)
        assert float((out - x).norm() / x.norm()) < 0.02


PATTERNS = (
    Dense(),
    ladder(4096, 256),
    Dilated([256, 512], [1, 2]),
    Dilated([4096], [1]),
    local(4096, width=512),
)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_scheme_sends_the_fewest_bytes(pattern, ranks):
    for causal, passes, kv_heads in ((False, "fwd", 8), (True, "fwd+bwd", 2)):
        shape = dict(heads=8, kv_heads=kv_heads)
        how = dict(causal=causal, passes=passes, estimates=False)
        advice = advise(GTX, 4096, ranks=ranks, pattern=pattern, **how, **shape)
        problem = Problem(
            pattern, layout_named(advice["layout"], 4096, ranks), causal, **shape
        )
        sent, how = {}, dict(batch=1, head_dim=64, dtype=advice["dtype"], passes=passes)
        for scheme in SCHEMES:
            with suppress(ValueError):
                problem.check(scheme)
                sent[scheme] = sum(
                    sent_bytes(problem, rank, scheme, **how) for rank in range(ranks)
                )
        assert sent[advice["scheme"]] == min(sent.values())
        if pattern == PATTERNS[2]:  # its segments fit the shards
            assert sent["plan"] == 0 and "nothing moves" in advice.choices["scheme"].why


def test_shares_of_work_are_those_of_a_count():
    """By the oracle's multiplicities, position by position."""
    x = torch.arange(50)
    for pattern, causal, p in product(
        (LADDER, Dense(), Dilated([7, 20], [1, 3])), (False, True), (2, 3)
    ):
        for layout in (contiguous(50, p), zigzag(50, p)):
            m = sum(
                pattern.multiplicity(x, x, head=h, heads=4) for h in range(4)
            )  # (n, n)
            m = m.tril() if causal else m
            work = [int(m[layout.positions(rank)].sum()) for rank in range(p)]
            found = unevenness(Problem(pattern, layout, causal, 4, 4), "plan")
            assert found == pytest.approx(max(work) * p / sum(work), rel=1e-12)
    # causal work is evened out where it must be and nowhere else
    how = dict(ranks=2, heads=1, estimates=False)
    for n, need, causal, layout in (
        (4096, "exact", True, "zigzag"),
        (4096, "exact", False, "contiguous"),
        (65536, "local", True, "contiguous"),
    ):
        assert advise(GTX, n, need=need, causal=causal, **how)["layout"] == layout


def test_memory_agrees_with_the_estimate(monkeypatch):
    pattern = ladder(8192)
    shape = dict(ranks=2, passes="fwd+bwd", heads=2, head_dim=16)
    ask = partial(advise, GTX, 8192, pattern=pattern, **shape)
    advice = ask()
    how = {x: advice[x] for x in ("dtype", "scheme", "layout")}
    how |= shape | dict(profile=GTX, backend="efficient")
    found = estimate(pattern, seq_len=8192, **how)
    assert advice.need_bytes == found.peak_bytes and advice.fits
    assert advice.advised.seconds == found.bound_s
    assert advice.advised.peak_bytes == found.peak_bytes
    assert ask(memory_bytes=found.peak_bytes).fits
    over = ask(memory_bytes=found.peak_bytes - 1)
    most = longest(pattern, found.peak_bytes - 1, **how)
    assert over.fits is False and 0.95 * most <= over.longest <= most < 8192
    assert (
        "does not fit" in over.memory and f"{over.longest:,} tokens fit" in over.memory
    )
    held = sum(found.parts[name] for name in ("q", "k", "v", "out", "lse"))
    deep = ask(layers=5)
    assert deep.need_bytes == found.peak_bytes + 4 * held
    assert deep["checkpointing"] is False
    kept = ask(layers=5, memory_bytes=deep.need_bytes - 1)
    assert kept["checkpointing"] and kept.fits
    assert kept.need_bytes == found.peak_bytes + 4 * found.parts["q"]
    calls = Mock(wraps=ringlab.attention)
    monkeypatch.setattr(ringlab, "attention", calls)
    exec(kept.code().replace("seq_len = 8192", "seq_len = 64"), {})
    # Of each layer q, k and v of its own, twice.
    assert len({x for call in calls.mock_calls for x in call.args[:3]}) == 5 * 3 * 2
    assert deep.cache_bytes is None
    deep = ask(layers=5, causal=True)
    sizes = dict(max_seq_len=8192, heads=2, head_dim=16, dtype=deep["dtype"], ranks=2)
    assert deep.cache_bytes == 5 * cache_bytes(pattern, **sizes)
    assert format_bytes(deep.cache_bytes) in deep.text()


def test_layers_count_in_time_and_memory():
    """Of half a card or more checkpointing leaves room for what is not attention."""
    ask = partial(advise, "rtx4090", 32768, **MODEL)
    deep = ask(passes="fwd+bwd", layers=32)
    assert deep["checkpointing"] and deep.need_bytes < 2**34 < deep.budget_bytes
    # Of 2 products forward and 5 backward, checkpointing makes the first two twice.
    one = 9 / 7 * ask(passes="fwd+bwd").advised.seconds
    each, total = (format_seconds(n * one) for n in (1, 32))
    assert f"≥ {each} a layer, ≥ {total} in all 32 layers" in deep.text()
    left = format_bytes(deep.budget_bytes - deep.need_bytes)
    assert f"{left} are left for weights, gradients and optimizer" in deep.memory
    few = {"seconds": 0.01, "estimates": False}
    once, far = (ask(layers=n, **few) for n in (1, 5))
    dense, near = once.options[0].seconds, once.options[-1].seconds
    assert far.takes.endswith(f"{format_seconds(2 * dense + 3 * near)} in all 5 layers")
    assert once.takes == once.advised.takes
    many = advise(GTX, 1024, layers=10**9)
    assert "one of 1,000,000,000 layers at a time" in many.text()
    assert many.need_bytes == advise(GTX, 1024).need_bytes


def test_one_question_has_one_value():
    """Whatever length is asked about, and whoever asks."""
    ask = partial(advise, GTX, causal=True, estimates=False)
    for how in ({}, {"ranks": 2}, {"heads": 32, "passes": "fwd+bwd"}):
        found = {ask(n, **how).dense_until for n in (512, 65536, 200_000)}
        assert len(found) == 1
        end = ask(int(0.99 * found.pop()), **how)
        assert end.options[0].seconds == pytest.approx(0.98, rel=0.01)
    for pattern in (Dense(), Dilated([2048, 4096], [1, 2])):
        how = {"pattern": pattern, "memory_bytes": 2**26}
        found = {advise(GTX, n, **how).longest for n in (8500, 9000, 10000)}
        assert found == {longest(pattern, "64MiB", profile=GTX, backend="efficient")}
    ends = {advise(GTX, n, memory_bytes=2**26).dense_until for n in (4096, 8192)}
    assert ends == {longest(Dense(), "64MiB", profile=GTX, backend="efficient")}


# --------------------------------------------------------------------------------------
# what to use

MODEL = dict(heads=32, kv_heads=8, head_dim=128, causal=True)
QUESTIONS = [  # profile, length, how, what to use; each was judged by hand
    ("gtx1080", "32K", {}, "exact"),
    ("gtx1080", "32K", MODEL, "far"),
    ("gtx1080", "128K", {}, "far"),
    ("gtx1080", "128K", dict(passes="fwd", ranks=8), "exact"),
    ("gtx1080", "512K", dict(passes="fwd"), "far"),
    ("rtx4090", "32K", MODEL, "exact"),
    ("rtx4090", "128K", {}, "exact"),
    ("rtx4090", "1M", dict(ranks=4), "far"),
    ("h100", "128K", MODEL, "exact"),
    ("h100", "1M", {}, "far"),
    ("h100", "1M", dict(ranks=8, causal=True), "exact"),
    ("h200", "256K", MODEL, "far"),
    ("h200", "1M", MODEL | dict(ranks=8), "far"),
]


@pytest.mark.parametrize("name, length, how, need", QUESTIONS)
def test_dense_attention_is_advised_while_a_call_takes_a_second(
    name, length, how, need
):
    n, how = parse_count(length), {"passes": "fwd+bwd"} | how
    shape = dict(heads=8, head_dim=64, ranks=1, causal=False) | how
    advice = advise(name, n, estimates=False, **how)
    profile = hardware.get_profile(name)
    # Two products of 2 FLOPs a pair and dimension forward, and five backward.
    pairs = shape["heads"] * (n * (n + 1) // 2 if shape["causal"] else n * n)
    flops = 4 * pairs * shape["head_dim"] * (1 if shape["passes"] == "fwd" else 3.5)
    takes = flops / profile.peak(profile.default_dtype()) / shape["ranks"]
    dense = next(x for x in advice.options if x.need == "exact")
    assert dense.seconds == pytest.approx(takes, rel=0.01) and dense.reach == (
        (n + 1) // 2 / n if shape["causal"] else 1
    )
    assert advice.advised.need == need == ("exact" if takes <= 1 else "far")
    assert advice.dense_until == pytest.approx(n / takes**0.5, rel=0.01)
    if need == "far":
        far, near = advice.advised, advice.options[-1]
        assert far.seconds == pytest.approx((takes + 3 * near.seconds) / 4, rel=0.01)
        assert far.reach == dense.reach and near.reach == 0 < far.dense_every == 4
        assert near.share < 0.2 and near.seconds < 0.2 * takes


def test_a_need_that_is_stated_is_met():
    ask = partial(advise, GTX, 131072, estimates=False, passes="fwd")
    for need in ("exact", "far", "local"):
        assert ask(need=need).advised.need == need
    assert ask(seconds=10).advised.need == "exact"
    assert ask(need="exact", seconds=1e-3).advised.pattern == Dense()
    assert advise(GTX, 1024, need="local", estimates=False).advised.need == "exact"
    short = ask(memory_bytes=2**31)
    assert short.ends == "time" and short.advised.need == "far"
    given = ask(pattern=LADDER)
    assert given.advised == given.options[0] and given.advised.pattern == LADDER
    assert [x.need for x in given.options] == ["asked", "exact", "far", "local"]
    full = advise(
        "h100", 131072, layers=32, memory_bytes=2**34, passes="fwd+bwd", **MODEL
    )
    assert full.ends == "memory" and full.advised.need == "exact" and not full.fits
    assert full.dense_until < 131072


def test_a_window_is_of_neighbours_and_longnet_of_all_positions():
    """The last query of a block sees the block, and as much on either side as was said."""
    for n, causal in product((8192, 2**20), (False, True)):
        x = torch.arange(n)
        last = x[n // 2 - 1 : n // 2]
        m = local(n, causal).multiplicity(last, x, n=n, head=0, heads=1)[0]  # (n,)
        seen = x[(m > 0) & (x <= last)] if causal else x[m > 0]
        assert len(seen) == keys_of(n) == {8192: 2176}.get(n, 2560)
        assert last - seen[0] >= (2048 if causal else 1024)
    for heads in (1, 4, 8):
        pattern = ladder(65536, heads=heads)
        for branch in pattern.branches(65536, heads):
            assert branch.rate <= heads
            assert {*branch.offsets} == {*range(branch.rate)}, "all positions take part"
    asked = advise(GTX, 65536, pattern=ladder(65536, heads=4), heads=4, estimates=False)
    assert asked.advised.pattern == ladder(65536, heads=4)
    far = far_queries(asked.advised.pattern, 65536, 4)
    assert asked.advised.reach == far / 65536 == 1


# --------------------------------------------------------------------------------------
# rows


def test_measured_calls_are_the_times():
    window = local(8192)
    rows = [
        Evidence(CallSpec(Dense(), 8192), 0.03),
        Evidence(CallSpec(Dense(), 32768), 0.7),
        Evidence(CallSpec(window, 8192), 0.001),
        Evidence(CallSpec(Dense(), 8192, dtype=torch.float16), 1e-9),
        Evidence(CallSpec(Dense(), 8192, passes="fwd+bwd"), 1e-9),
    ]

    def ask(n, **how):
        advice = advise(GTX, n, **dict(passes="fwd", rows=rows, estimates=False) | how)
        return {x.need: x for x in advice.options}, advice

    at, _ = ask(8192)
    assert [at[x].seconds for x in ("exact", "local")] == [0.03, 0.001]
    assert at["far"].seconds == pytest.approx(0.033 / 4)
    assert {x.time for x in at.values()} == {"measured"}
    at, advice = ask(65536)
    # By the work: of a window somewhat more than 8 times, since the ends see less.
    assert at["exact"].seconds == pytest.approx(4 * 0.7)
    assert at["local"].seconds == pytest.approx(8.5 * 0.001, rel=0.05)
    assert {x.time for x in at.values()} == {"about"}
    assert advice.dense_until < 65536 and advice.advised.need == "far"
    assert ask(8192, heads=4)[0]["exact"].time == "about"
    two, _ = ask(8192, ranks=2)
    assert {x.time for x in two.values()} == {"at least"}
    # Between two measured lengths: the rate of the longer one, within their times.
    between, _ = ask(16384)
    assert between["exact"].seconds == pytest.approx(0.7 / 4)
    # Another window is no better evidence than this one at another length, and a call
    # that waits for the host says nothing of longer ones.
    waits = [
        Evidence(CallSpec(window, n), s)
        for n, s in ((8192, 0.2), (32768, 0.3), (131072, 1.0))
    ]
    other = CallSpec(sliding_window(1, block_size=64), 16384)
    waits.append(Evidence(other, 0.2))
    for n, low, high in ((16384, 0.2, 0.3), (65536, 0.3, 1.0)):
        assert low <= ask(n, rows=waits)[0]["local"].seconds <= high
    far, _ = ask(262144, rows=waits)
    assert far["local"].seconds == pytest.approx(2, rel=0.01)
    double, _ = ask(8192, dtype=torch.float64)
    assert {x.time for x in double.values()} == {"at least"}


def test_stored_rows_become_evidence_and_bad_ones_do_not():
    rows = made("000")
    plain = [
        r.median
        for r in study_of(rows).good
        if r.point.system == "ringlab" and not r.point.options and r.median
        if r.point.world_size == 1
    ]
    assert plain and [e.seconds for e in evidence(study_of(rows))] == plain
    assert evidence(study_of([replace(r, errors={}) for r in rows])) == ()


def test_methods_that_choose_their_keys_are_named_where_rows_say_so():
    rows = [
        Evidence(CallSpec(Dense(), n, causal=True), 1.0, name, part)
        for n, parts in ((8192, (0.9, 1.5)), (16384, (0.75, 0.5)), (65536, (0.2, 0.1)))
        for name, part in zip(("MoBA", "NSA"), parts)
    ]
    ask = partial(advise, "cpu", causal=True, estimates=False, rows=rows)
    said = ask(20_000, trained={"NSA": "it learned"}).choosing
    assert said[0].startswith("NSA: 0.5 of the time") and said[0].endswith("it learned")
    assert "at 16,384 tokens, measured" in said[1] and said[1].endswith("is unknown")
    assert said[1] in ask(20_000).text()
    assert [line[:4] for line in ask(8192).choosing] == ["MoBA"]
    for other in ({"causal": False}, {"heads": 4}, {"passes": "fwd+bwd"}, {"ranks": 2}):
        assert ask(20_000, **other).choosing == ()
    assert ask(4096).choosing == () and "by content" not in ask(4096).text()
    with pytest.raises(TypeError, match="rows must be"):
        ask(4096, rows=[1])


def test_rows_of_methods_stand_beside_dense_attention():
    groups = suites.selection(hardware.get_profile("cpu"))
    rows = [made_up(point, group) for group in groups for point in group.points]
    found = choosing(study_of(rows))
    by_point = {(r.group, r.point.id): r.median for r in study_of(rows).good}
    parts = []
    for r in study_of(rows).good:
        if r.point.system in ("moba", "nsa", "dsa", "vertical_slash"):
            if "choice" not in dict(r.point.options):
                dense = r.point.but(system="ringlab", options={}).id
                parts.append(r.median / by_point[r.group, dense])
    assert parts and sorted(x.of_dense for x in found) == sorted(parts)
    assert {x.method for x in found} == {"MoBA", "NSA", "DSA", "Vertical and slash"}
    assert {x.call.passes for x in found} == {"fwd", "fwd+bwd"}


def test_rows_of_another_cpu_are_no_evidence(monkeypatch, tmp_path):
    monkeypatch.setattr("ringlab.report.evidence.reports_folder", lambda: tmp_path)
    profile, mine = hardware.get_profile("cpu"), study_of(made("000"))
    monkeypatch.setattr("ringlab.report.evidence.read_study", lambda *_: mine)
    machines = {r.provenance["machine"] for r in mine.good}
    monkeypatch.setattr("ringlab.measure.machine_id", machines.pop)
    assert stored(profile)[1] == evidence(mine) + choosing(mine)
    monkeypatch.setattr("ringlab.measure.machine_id", lambda: "another")
    assert stored(profile) == (profile, ())
    assert learned() == {}


def test_what_small_models_learned_is_that_of_the_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("ringlab.report.evidence.reports_folder", lambda: tmp_path)
    facts = {"tokens": 512, "window": 48, "recalled": {"Dense": 508, "Window": 32}}
    facts |= {"answered": {"Dense": "98.5", "MoBA": "45.7 ± 2.4"}}
    for name, reports in (
        ("a", "no list"),
        ("b", [{"name": "quality", "facts": facts}]),
    ):
        (tmp_path / name / "data").mkdir(parents=True)
        text = json.dumps({"reports": reports})
        (tmp_path / name / "data" / "manifest.json").write_text(text)
    said = learned()
    assert said.keys() == {"dense", "local", "MoBA"} and "508 of 512" in said["dense"]
    assert "answers 45.7 ± 2.4 % of questions" in said["MoBA"]
    assert capsys.readouterr().err.count("\n") == 1, "the broken one is named"
    advice = advise(GTX, 131072, estimates=False, trained=said)
    assert said["local"] in advice.options[-1].evidence
    assert "unknown" in advice.why


# --------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(ranks=0), "ranks must be a positive integer, got 0"),
        (dict(seq_len=0), "seq_len must be a positive integer up to 2**40, got 0"),
        (dict(seq_len=2, ranks=4), "4 ranks are more than 2 tokens"),
        (dict(pattern="ring"), "unknown pattern 'ring'; known: dilated"),
        (dict(pattern=7), "pattern must be ringlab.Dense()"),
        (
            dict(memory_bytes=2**20),
            "1 MiB cannot hold the inputs: q, k and v of a rank are 6 MiB",
        ),
        (dict(memory_bytes=0), "memory_bytes must be a positive number, got 0"),
        (dict(seconds=float("nan")), "seconds must be a positive number, got nan"),
        (dict(need="speed"), "unknown need 'speed'; known: exact, far, local"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, message):
    with pytest.raises((ValueError, TypeError)) as error:
        advise(**{"profile": "gtx1080", "seq_len": 1024} | arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_command_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("ringlab.report.evidence.reports_folder", lambda: tmp_path)

    def said(how: str) -> str:
        assert cli.main(f"advise --profile gtx1080 {how}".split()) == 0
        out, err = capsys.readouterr()
        assert not err
        return out

    out = said("--ranks 2 --seq-len 131072 --causal --memory 8GiB --passes fwd")
    for part in ("of 8 GiB", "scheme plan", "causal, forward"):
        assert part in out
    exec(compile(said("--seq-len 1024 --show code"), "printed", "exec"), {})
    assert "(1, 1024, 8, 64)" in capsys.readouterr().out

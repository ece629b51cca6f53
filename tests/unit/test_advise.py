"""Advice runs, moves the fewest bytes, agrees with the estimate and follows the rows."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
import ringlab
import torch
from reporting import GOOD, made, made_up, study_of
from ringlab import (
    Dense,
    Dilated,
    Evidence,
    Execution,
    advise,
    cache_bytes,
    cli,
    hardware,
)
from ringlab.advise import ladder, local
from ringlab.cost import count_pairs
from ringlab.estimate import estimate, longest
from ringlab.measure import Group, Point
from ringlab.report.evidence import evidence
from ringlab.ring import SCHEMES, Problem, contiguous, zigzag
from ringlab.ring.layout import layout_named
from ringlab.ring.volume import sent_bytes, unevenness

GTX, SMALL = hardware.get_profile("gtx1080"), dict(heads=4, head_dim=16)
LADDER = Dilated([12, 36], [1, 2])


@pytest.mark.parametrize("name", hardware.profiles())
def test_the_code_compiles_and_runs_at_a_reduced_length(name):
    for ranks, n in ((1, 131072), (2, 8192)):
        advice = advise(
            name,
            n,
            ranks=ranks,
            heads=2,
            head_dim=16,
            estimates=(name, ranks) == ("gtx1080", 1),
        )
        assert f"\nseq_len = {n}\n" in advice.code() and advice.fits is not False
        names: dict = {}
        exec(advice.code().replace(f"seq_len = {n}", "seq_len = 260"), names)
        assert (
            names["out"].shape == (1, 260, 2, 16)
            and names["out"].dtype == advice["dtype"]
        )
        assert (
            torch.isfinite(names["out"]).all() and torch.isfinite(names["q"].grad).all()
        )
        want = ringlab.reference.attention(
            *(names[x].detach() for x in "qkv"), advice["pattern"]
        )[0]
        assert (
            float((names["out"].detach().cpu() - want.cpu()).norm() / want.norm().cpu())
            < 0.02
        )
        assert all(name in advice.text() for name in advice.choices)


PATTERNS = (
    Dense(),
    ladder(4096, 256),
    Dilated([256, 512], [1, 2]),
    Dilated([4096], [1]),
    local(4096, 4, 512),
)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_scheme_sends_the_fewest_bytes(pattern, ranks):
    for causal, passes, kv_heads in ((False, "fwd", 8), (True, "fwd+bwd", 2)):
        shape = dict(heads=8, kv_heads=kv_heads)
        advice = advise(
            GTX,
            4096,
            ranks=ranks,
            causal=causal,
            passes=passes,
            pattern=pattern,
            estimates=False,
            **shape,
        )
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


def test_a_network_is_refused_in_one_line_that_says_what_to_use():
    for call in (advise, estimate):
        with pytest.raises(TypeError, match="of networks were removed; esti") as error:
            if call is advise:
                advise("cpu", 512, ranks=4, network=object())
            else:
                estimate(Dense(), seq_len=512, ranks=4, network=object())
        assert "\n" not in str(error.value)


def test_the_ladder_comes_with_the_share_of_queries_that_see_far():
    for heads, causal, share in ((8, False, "12.5 %"), (32, True, "25 %")):
        how = dict(heads=heads, causal=causal, estimates=False)
        why = advise(GTX, 131072, **how).choices["pattern"].why
        assert f"; {share} of queries see a key at least half" in why
        assert why.endswith(" (causal: 50 at most)") == causal


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
    assert advise(GTX, 4096, pattern="dense", causal=True, **how)["layout"] == "zigzag"
    assert advise(GTX, 4096, pattern="dense", **how)["layout"] == "contiguous"
    assert advise(GTX, 65536, causal=True, **how)["layout"] == "contiguous"


def test_memory_agrees_with_the_estimate():
    shape = dict(ranks=2, pattern=ladder(8192), passes="fwd+bwd", heads=2, head_dim=16)
    advice = advise(GTX, 8192, **shape)
    how = dict(
        dtype=torch.float32,
        scheme=advice["scheme"],
        layout=advice["layout"],
        profile=GTX,
        backend="efficient",
    )
    found = estimate(
        shape["pattern"],
        seq_len=8192,
        **{k: v for k, v in shape.items() if k != "pattern"},
        **how,
    )
    assert (
        advice.need_bytes == found.peak_bytes
        and advice.fits
        and advice.proposals[0].bound_s == found.bound_s
    )
    assert advise(GTX, 8192, memory_bytes=found.peak_bytes, **shape).fits
    over = advise(GTX, 8192, memory_bytes=found.peak_bytes - 1, **shape)
    most = longest(
        shape["pattern"],
        found.peak_bytes - 1,
        ranks=2,
        passes="fwd+bwd",
        heads=2,
        head_dim=16,
        **how,
    )
    assert (
        over.fits is False
        and 0.95 * most <= over.longest <= most < 8192
        and over.enough_ranks == 4
    )
    assert (
        "does not fit" in over.memory
        and f"{over.longest:,} tokens fit; 4 ranks hold it" in over.memory
    )
    held = sum(found.parts[name] for name in ("q", "k", "v", "out", "lse"))
    deep = advise(GTX, 8192, layers=5, **shape)
    assert (
        deep.need_bytes == found.peak_bytes + 4 * held
        and deep["checkpointing"] is False
    )
    kept = advise(GTX, 8192, layers=5, memory_bytes=deep.need_bytes - 1, **shape)
    assert (
        kept["checkpointing"]
        and kept.need_bytes == found.peak_bytes + 4 * found.parts["q"]
        and kept.fits
    )
    assert "checkpoint(attend, q, k, v" in kept.code()
    exec(kept.code().replace("seq_len = 8192", "seq_len = 64"), {})
    assert deep.cache_bytes is None and "generation" not in deep.text()
    deep = advise(GTX, 8192, layers=5, causal=True, **shape)
    sizes = dict(max_seq_len=8192, heads=2, head_dim=16, dtype=deep["dtype"], ranks=2)
    assert deep.cache_bytes == 5 * cache_bytes(shape["pattern"], **sizes)
    assert "the caches of 5 layers for 8,192 tokens: " in deep.text()


def test_a_kernel_that_forms_scores_is_tiled_where_they_do_not_fit():
    advice = advise(
        GTX,
        2048,
        dtype=torch.float64,
        pattern="dense",
        memory_bytes=2**26,
        passes="fwd",
        **SMALL,
    )
    assert (
        advice["execution"] == Execution(tile=512)
        and advice.fits
        and "without tiles" in advice.text()
    )
    assert (
        advise(GTX, 2048, pattern="dense", memory_bytes=2**26, passes="fwd", **SMALL)[
            "execution"
        ]
        == Execution()
    )


def test_the_first_segment_is_as_long_as_the_time_allows():
    found = [
        advise("h200", 65536, seconds=s, passes="fwd", causal=True)
        for s in (1.0, 2e-3, 1e-4, 1e-9)
    ]
    firsts = [getattr(a["pattern"], "segment_lengths", [65536])[0] for a in found]
    assert (
        found[0]["pattern"] == Dense()
        and firsts == sorted(firsts, reverse=True)
        and firsts[1] > firsts[2]
    )
    for allowed, advice in zip((2e-3, 1e-4), found[1:]):
        one, two = (
            ladder(65536, first)
            for first in (firsts[found.index(advice)], 2 * firsts[found.index(advice)])
        )
        how = dict(seq_len=65536, causal=True, dtype=torch.bfloat16, profile="h200")
        assert (
            advice["pattern"] == one
            and estimate(one, **how).bound_s <= allowed < estimate(two, **how).bound_s
        )
    assert firsts[3] == 256 and "no ladder keeps to" in found[3].choices["pattern"].why


# --------------------------------------------------------------------------------------
# rows


def row(about, setting, against, ratio, **more) -> Evidence:
    label = dict(
        label="8,192 tokens", origin="rows at commit abc", seq_len=8192, dtype="float32"
    )
    return Evidence(
        about, setting, against, ratio, 0.9 * ratio, 1.1 * ratio, **label | more
    )


EAGER = row("backend", "eager", "efficient", 1.5)
HALF = row("dtype", "float16", "float32", 1.3, dtype="")
POOL = row("pool", "True", "False", 1.3, pattern="dilated [4] / [1]")
BLOCKS = replace(
    POOL, about="blocks", setting="views", against="auto", pattern="blocks of 64"
)
RING = row("scheme", "ring", "plan", 1.3, ranks=2, pattern=str(ladder(8192)))
TWO, FORWARD = dict(ranks=2), dict(passes="fwd")
SHARE = count_pairs(ladder(8192), 8192, 8)[0] / count_pairs(Dense(), 8192, 8)[0]
LOST = row("pattern", "dilated [2048] / [1]", "dense", 0.8, share=SHARE)
WON = replace(LOST, ratio=2.0, low=1.8, high=2.2, share=1.2 * SHARE)


@pytest.mark.parametrize(
    "name, rows, options, value, how",
    [
        (
            "backend",
            [EAGER],
            {},
            ("eager", "auto"),
            "measured: 1.5x (1.35 to 1.65), rows at commit abc",
        ),
        (
            "backend",
            [row("backend", "auto", "eager", 0.5)],
            {},
            ("eager", "auto"),
            "measured: 2x",
        ),  # either way round
        (
            "backend",
            [row("backend", "eager", "efficient", 0.5)],
            {},
            "auto",
            "measured: 2x",
        ),
        *[
            ("backend", [replace(EAGER, **other)], {}, "auto", "by policy")
            for other in (
                {"counts": False},
                {"low": 0.9},
                {"least": 1.6},
                {"dtype": "x"},
            )
        ],
        # the row nearest in length decides
        (
            "backend",
            [replace(row("backend", "eager", "auto", 0.8), seq_len=16384), EAGER],
            dict(seq_len=131072),
            "auto",
            "measured: 1.25x",
        ),
        ("dtype", [HALF], {}, torch.float16, "measured"),
        ("dtype", [], {}, torch.float32, "by policy"),
        ("dtype", [HALF], dict(dtype=torch.float64), torch.float64, "as asked"),
        ("execution", [POOL], {}, Execution(pool=True), "measured"),
        (
            "execution",
            [replace(POOL, pattern="blocks of 64")],
            {},
            Execution(),
            "by policy",
        ),
        (
            "execution",
            [BLOCKS],
            dict(pattern="local"),
            Execution(blocks="views"),
            "measured",
        ),
        ("scheme", [RING], TWO, "ring", "measured"),
        ("scheme", [], TWO, "plan", "by estimate"),
        (
            "scheme",
            [replace(RING, pattern="dilated [8] / [1]")],
            TWO,
            "plan",
            "by estimate",
        ),
        ("scheme", [RING], dict(ranks=4), "plan", "by estimate"),
        ("pattern", [LOST], FORWARD, Dense(), "measured: 0.8x"),
        ("pattern", [WON], FORWARD, ladder(8192), "measured: 2x"),
        *[
            ("pattern", [replace(LOST, **other)], FORWARD, ladder(8192), "by policy")
            for other in (
                {"passes": "fwd+bwd"},
                {"causal": True},
                {"dtype": "bfloat16"},
                {"share": 0.6 * SHARE},
                TWO,
                {"counts": False},
            )
        ],
    ],
)
def test_rows_decide_and_those_of_others_do_not(name, rows, options, value, how):
    advice = advise(GTX, **{"seq_len": 8192} | options, rows=rows, estimates=False)
    found = advice.choices[name]
    assert found.value == value and found.how.startswith(how)
    assert all(e.text in advice.text() for e in found.evidence)
    assert ("decides nothing" in advice.text()) == (
        found.evidence != () and not rows[0].counts
    )


def test_measured_settings_are_in_the_code():
    half, eager = (
        replace(HALF, setting="bfloat16"),
        row("backend", "eager", "auto", 1.3, dtype="bfloat16"),
    )
    code = advise("cpu", 8192, rows=[POOL, half, eager], estimates=False).code()
    assert "execution=ringlab.Execution(pool=True)" in code
    assert "backend=('eager', 'auto')" in code and "torch.bfloat16" in code


def test_stored_rows_become_evidence_and_bad_ones_do_not():
    found = evidence(study_of(made("000")))
    abouts = {e.about for e in found}
    assert {"dtype", "backend", "pattern", "gather", "pool"} <= abouts and all(
        e.counts for e in found
    )
    by = {
        (e.about, e.setting, e.against, e.seq_len): e
        for e in (*found, *(e.turned() for e in found))
    }
    assert by["backend", "auto", "eager", 8192].ratio == pytest.approx(
        2, rel=0.1
    )  # as the rows were made
    assert by["gather", "False", "True", 8192].faster
    elsewhere = evidence(study_of(made("000")), here="another")
    assert len(elsewhere) == len(found) and not any(e.counts for e in elsewhere)
    assert "another machine (a CPU)" in elsewhere[0].origin
    rehearsed = evidence(study_of(made("000", "gtx1080", True)))
    assert (
        rehearsed
        and not any(e.counts for e in rehearsed)
        and "a rehearsal" in rehearsed[0].origin
    )
    assert evidence(study_of([replace(r, errors={}) for r in made("000")])) == ()
    few = [replace(r, seconds=r.seconds[:4], rounds=r.rounds[:4]) for r in made("000")]
    assert evidence(study_of(few)) == (), "no interval, no evidence"
    # ranks: a published system is its scheme
    point = Point(**GOOD | {"world_size": 2})
    pair = Group(
        "pair",
        (
            point.but(options={"scheme": "plan"}),
            point.but(system="RingDilatedAttentionV2Robust"),
        ),
    )
    ranks = [
        made_up(p, pair, False, ranks={"scheme": s})
        for p, s in zip(pair.points, ("plan", "ring"))
    ]
    (only,) = evidence(study_of(ranks))
    assert (only.about, {only.setting, only.against}, only.ranks) == (
        "scheme",
        {"plan", "ring"},
        2,
    )
    both = [ranks[0], replace(ranks[1], point=ranks[1].point.but(dtype="bfloat16"))]
    assert evidence(study_of(both)) == (), (
        "which of two settings made the difference is not known"
    )
    assert (
        evidence(
            study_of(
                [replace(r, ranks=r.ranks | {"oversubscribed": True}) for r in ranks]
            )
        )
        == ()
    )


# --------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(ranks=0), "ranks must be a positive integer, got 0"),
        (dict(seq_len=0), "seq_len must be a positive integer up to 2**40, got 0"),
        (dict(seq_len=2, ranks=4), "4 ranks are more than 2 tokens"),
        (
            dict(pattern="ring"),
            "pattern must be a ringlab pattern or one of auto, dense, ladder, local, got 'ring'",
        ),
        (
            dict(memory_bytes=2**20),
            "1 MiB cannot hold the inputs: q, k and v of a rank are 6 MiB",
        ),
        (dict(memory_bytes=0), "memory_bytes must be a positive number, got 0"),
        (dict(seconds=float("nan")), "seconds must be a positive number, got nan"),
        (
            dict(profile="generic", seconds=1.0),
            "profile 'generic' has no rates, so no bound to hold to 1 s",
        ),
        (dict(layout="rings", ranks=2), "unknown layout 'rings'"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, message):
    with pytest.raises(ValueError) as error:
        advise(**{"profile": "gtx1080", "seq_len": 1024} | arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_command_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("ringlab.report.evidence.reports_folder", lambda: tmp_path)

    def said(*argv):
        return cli.main(["advise", "--profile", "gtx1080", *argv]), *capsys.readouterr()

    code, out, err = said(
        "--ranks",
        "2",
        "--seq-len",
        "131072",
        "--causal",
        "--memory",
        "8GiB",
        "--passes",
        "fwd",
    )
    assert (
        code == 0
        and err == ""
        and "of 8 GiB" in out
        and "scheme         plan" in out
        and "causal, forward" in out
    )
    code, out, _ = said("--seq-len", "1024", "--show", "code")
    exec(compile(out, "printed", "exec"), {})
    assert code == 0
    for bad, why in (
        (["--ranks", "0"], "ranks must be a positive"),
        (["--memory", "1KB"], "1000 B cannot hold"),
    ):
        code, out, err = said("--seq-len", "1024", *bad)
        assert (code, out, err.count("\n")) == (2, "", 1) and why in err

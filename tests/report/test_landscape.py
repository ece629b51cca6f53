"""The landscape: packages of others through their real builders and checks, and a
ranking that follows the rows.
"""

import functools
import importlib
import json
import re
import sys
from dataclasses import replace

import pytest
from reporting import Shown, longer, made_up, slower, study_of
from ringlab import cost, hardware, measure, patterns
from ringlab.advise import local
from ringlab.block_patterns import sliding_window
from ringlab.measure import Group, Point, peers, suites
from ringlab.measure.model_systems import STEPS
from ringlab.measure.points import Result
from ringlab.measure.systems import build
from ringlab.measure.workers import Worker
from ringlab.presets import ladder
from ringlab.report import cells, study, tables

NAME = "landscape"
SYSTEMS = suites.landscape_systems()
SPEEDS = {
    "BigBird": 2.2,
    "Local and global": 1.3,
    "LongNet from 256": 2.0,
    "FlexAttention": 1.6,
}  # times by its pairs

# --------------------------------------------------------------------------------------
# packages of others: small stand-ins under their names, whose attention is this library's or a wrong one

GROUPED = """
from types import SimpleNamespace
import ringlab
xops = SimpleNamespace()
class DilatedAttention:
    def __init__(self, segment_lengths, dilation_rates):
        self.pattern = ringlab.Dilated(segment_lengths, dilation_rates, mixing="head_groups", offsets="branch")
    def __call__(self, q, k, v, is_causal=False):
        xops.memory_efficient_attention(q, k, v)  # what a CPU lacks, and is put there
        return {wrong} * ringlab.attention(q, k, v, self.pattern, causal=is_causal) / len(self.pattern.dilation_rates)
"""
LONGNET = """
import torch, ringlab
from .multihead_attention import MultiheadAttention
class DilatedAttention(MultiheadAttention):
    def __init__(self, args, embed_dim, num_heads, self_attention):
        super().__init__()
        self.args, self.heads = args, num_heads
        self.q_proj = self.k_proj = self.v_proj = self.out_proj = torch.nn.Linear(embed_dim, embed_dim)
    def forward(self, query, key, value, is_causal=False):
        tensors = zip((self.q_proj, self.k_proj, self.v_proj), (query, key, value))
        q, k, v = (p(t).unflatten(2, (self.heads, -1)) for p, t in tensors)
        assert self.attention_ops(q, k, v, is_causal)[1].shape[1] == self.heads
        pattern = ringlab.Dilated(self.args.segment_length, self.args.dilated_ratio, offsets="block")
        out = ringlab.attention(q, k, v, pattern, causal=is_causal)
        {detached}
        return self.out_proj(out.flatten(2)), None
"""
LONGNETS_BASE = """
import torch
flash_attn_func = None
class MultiheadAttention(torch.nn.Module):
    def attention_ops(self, q, k, v, is_causal):
        return flash_attn_func(q, k, v, 0.0, None, None, is_causal)
"""
LOCAL = """
import ringlab
from ringlab.block_patterns import sliding_window
class LocalAttention:
    def __init__(self, window_size, causal=False, use_rotary_pos_emb=True):
        assert not use_rotary_pos_emb, "another function"
        self.pattern, self.causal = sliding_window(1, block_size=window_size), causal
    def __call__(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return {wrong} * ringlab.attention(q, k, v, self.pattern, causal=self.causal).transpose(1, 2)
"""
RING = """
import ringlab
def ring_flash_attn(q, k, v, mask=None, causal=False, bucket_size=1024):
    return {wrong} * ringlab.attention(q, k, v, ringlab.Dense(), causal=causal)
"""
FILES = {
    "dilated_attention_pytorch": (
        "dilated_attention_pytorch/dilated_attention.py",
        GROUPED,
    ),
    "torchscale_dilated": ("torchscale/component/dilated_attention.py", LONGNET),
    "local_attention": ("local_attention/__init__.py", LOCAL),
    "ring_attention_pytorch": ("ring_attention_pytorch/ring_flash_attention.py", RING),
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """install(system, ...): a stand-in package, or another ``source``, with the
    metadata that pip writes.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(
        system: str, version="9.1", commit="", wrong=1.0, detached="pass", source=""
    ):
        name, template = FILES[system]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in [path.parent, *path.parent.parents][: name.count("/")]:
            (folder / "__init__.py").touch()
        path.write_text(source or template.format(wrong=wrong, detached=detached))
        (path.parent / "multihead_attention.py").write_text(LONGNETS_BASE)
        known = (
            tmp_path
            / f"{peers.PEERS[system].package.replace('-', '_')}-{version}.dist-info"
        )
        known.mkdir()
        (known / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {peers.PEERS[system].package}\nVersion: {version}\n"
        )
        if commit:
            (known / "direct_url.json").write_text(
                json.dumps({"vcs_info": {"commit_id": commit}})
            )
        importlib.invalidate_caches()

    yield install
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {path.split("/")[0] for path, _ in FILES.values()}:
            del sys.modules[name]


def small(system: str):
    kept = {"torchscale_dilated": {"offsets": "block"}}.get(
        system, {"mixing": "head_groups", "offsets": "branch"}
    )
    others = {
        "ring_attention_pytorch": patterns.Dense(),
        "local_attention": sliding_window(1, block_size=16),
    }
    return others.get(system) or patterns.Dilated([16, 64], [1, 4], **kept)


def prepared(system: str, **more) -> dict:
    """What a worker answers that is asked to build, run and check the peer's point."""
    shape = {"pattern": small(system), "seq_len": 64, "heads": 4, "head_dim": 8}
    settings = {"point": Point(system, **shape | more).to_dict(), "device": "cpu"}
    return {"status": "ok"} | Worker(settings).answer("prepare", tolerance={})


@pytest.mark.parametrize("system", peers.PEERS)
def test_a_package_that_computes_what_it_says_is_ok(site, system):
    site(system)
    assert peers.installed(system) == "9.1"
    for more in ({}, {"passes": "fwd+bwd"}, {"passes": "fwd+bwd", "causal": True}):
        found = prepared(system, options={"version": "9.1"}, **more)
        assert found["status"] == "ok" and found["errors"].keys() >= {"out"}, found.get(
            "reason"
        )
    if system == "torchscale_dilated":
        component = importlib.import_module("torchscale.component.multihead_attention")
        assert component.flash_attn_func is None, "the package is as it was"


OFF, BROKEN = "out is off by 1.0e-03, allowed 5.0e-06", "import no_such_thing\n"


@pytest.mark.parametrize(
    "system, package, point, status, said",
    [
        *(
            (system, None, {}, "unsupported", f"{p.package} is not installed: {p.how}")
            for system, p in peers.PEERS.items()
        ),
        (
            "torchscale_dilated",
            {"version": "0.3.0", "commit": "1a2b3c4d5e6f"},
            {"options": {"version": "0.2.0"}},
            "unsupported",
            "torchscale 0.2.0 was asked for, 0.3.0+1a2b3c4 is installed",
        ),
        (
            "dilated_attention_pytorch",
            {"source": BROKEN},
            {},
            "unsupported",
            "cannot be imported: No module named 'no_such_thing'",
        ),
        (
            "torchscale_dilated",
            {},
            {"pattern": patterns.Dense()},
            "unsupported",
            "computes dilated lse with offsets by block, not dense",
        ),
        (
            "torchscale_dilated",
            {},
            {"kv_heads": 2},
            "unsupported",
            "as many K/V heads as heads, got 2 and 4",
        ),
        (
            "ring_attention_pytorch",
            {},
            {"pattern": small("torchscale_dilated")},
            "unsupported",
            "computes dense attention, not dilated",
        ),
        (
            "local_attention",
            {},
            {"pattern": sliding_window(2, block_size=16)},
            "unsupported",
            "computes a window of one block either way, not",
        ),
        (
            "local_attention",
            {},
            {"seq_len": 60},
            "unsupported",
            "needs whole blocks of 16, got 60 positions",
        ),
        (
            "dilated_attention_pytorch",
            {},
            {"seq_len": 96},
            "unsupported",
            "needs whole segments of 64, got 96 positions",
        ),
        ("dilated_attention_pytorch", {"wrong": 1.001}, {}, "incorrect", OFF),
        (
            "torchscale_dilated",
            {"detached": "out = out + 0.1 * (q - q.detach())"},
            {"passes": "fwd+bwd"},
            "incorrect",
            "dq is off by",
        ),
    ],
)
def test_an_absent_another_or_a_wrong_package_is_told_apart(
    site, system, package, point, status, said
):
    if package is not None:
        site(system, **package)
    elif peers.installed(system):
        pytest.skip(f"{system} is installed here")
    found = prepared(system, **point)
    assert found["status"] == status and said in found["reason"]
    assert "passes" not in point or prepared(system)["status"] == "ok", "right forward"


def test_a_package_runs_on_one_device():
    with pytest.raises(NotImplementedError, match="one device, not on 2 ranks"):
        build(
            Point(
                "torchscale_dilated",
                small("torchscale_dilated"),
                seq_len=64,
                world_size=2,
            ),
            "cpu",
        )


@pytest.mark.parametrize("system", ["torchscale_dilated", "dilated_attention_pytorch"])
def test_a_gpu_runs_the_packages_own_kernel(site, system, monkeypatch):
    site(system)
    monkeypatch.setattr(peers, "_copy_with", lambda *_, **__: pytest.fail("replaced"))
    point = Point(system, small(system), seq_len=64, heads=4, head_dim=8)
    assert getattr(peers, system)(point, "cuda")


# --------------------------------------------------------------------------------------
# the suite


def the_suite(name="cpu", installed=(), **how) -> list[Group]:
    """The suite as it is where these packages are installed, whatever is installed
    here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            peers, "installed", lambda system: "9.1" if system in installed else None
        )
        return suites.SUITES[NAME](hardware.get_profile(name), **how)


@pytest.mark.parametrize("name", ["cpu", "gtx1080", "h200"])
def test_the_suite_holds_the_field_at_a_like_number_of_keys(name):
    groups = the_suite(name)
    assert {p.system for g in groups for p in g.points} == {
        "dense_sdpa",
        "ringlab",
        "flex",
        "generation",
        "packed",
    }, "other packages only where they are installed"
    for p in (
        p for g in groups if g.name.startswith(suites.LANDSCAPE) for p in g.points
    ):
        like = p.pattern not in (
            patterns.Dense().to_dict(),
            ladder(p.seq_len).to_dict(),
            local(p.seq_len).to_dict(),
        )  # LongNet and what is advised are as they are
        assert not like or 270 <= cells.density(p) * p.seq_len <= 460, p.label()


def test_an_installed_package_is_measured_with_its_version_in_turns_with_this_library():
    before, after = (
        the_suite(installed=names) for names in ((), ("torchscale_dilated",))
    )
    changed = [g for g in after if g not in before]
    assert [g.name for g in changed] == ["beside torchscale", "beside, causal"], (
        "no other row is measured anew"
    )
    beside, causal = changed
    theirs = [p for p in beside.points if p.system == "torchscale_dilated"]
    assert [p.but(system="ringlab", options={}) for p in theirs] == [
        p for p in beside.points if p not in theirs
    ]
    assert (
        {p.options for p in theirs} == {(("version", "9.1"),)}
        and beside.timed
        and beside.interleave
    )
    found = [(p.seq_len, p.passes) for p in theirs]
    assert found == [(4096, "fwd"), (16384, "fwd"), (4096, "fwd+bwd")]
    assert [(p.passes, p.causal) for p in causal.points] == [
        ("fwd+bwd", True)
    ] and not causal.timed


def test_a_wrong_package_is_not_timed(site, tmp_path):
    for system, wrong in (("ring_attention_pytorch", 1.001), ("local_attention", 1.0)):
        site(system, wrong=wrong)
    how = {"seq_len": 64, "heads": 4, "head_dim": 8, "options": {"version": "9.1"}}
    points = [
        Point(s, small(s), **how) for s in ("ring_attention_pytorch", "local_attention")
    ]
    off, right = measure.run(
        [Group("beside", points)], tmp_path / "rows", profile="cpu"
    )
    assert (
        off.status == "incorrect"
        and not off.seconds
        and off.median is None
        and OFF in off.reason
    )
    assert right.status == "ok" and right.median > 0


# --------------------------------------------------------------------------------------
# the page


def row_of(point: Point, group: Group) -> Result:
    """A made-up row; another package takes half as long again as this library on its
    function.
    """
    row = replace(
        made_up(point.but(system="ringlab", options={}), group, False), point=point
    )
    if point.system == "generation":
        return replace(row, memory=row.memory | {"cache_bytes": point.seq_len * 2**10})
    if point.system == "packed":
        return row if row.option("equal") else longer(row, 1.1)
    return longer(
        row,
        next(
            (x for name, x in SPEEDS.items() if of(name)(row)),
            1.5 if row.option("version") else 1.0,
        ),
    )


LOST = {"median": None, "ci": None, "seconds": (), "rounds": (), "errors": {}}


@functools.cache
def made(*names: str) -> tuple[Result, ...]:
    return tuple(row_of(p, g) for g in the_suite(installed=names) for p in g.points)


@functools.cache
def page(change=None, *names: str) -> study.Study:
    rows = made(*names)
    return study_of(map(change, rows) if change else rows, suite=NAME)


@functools.cache
def shown(change=None, *names: str) -> Shown:
    return Shown(NAME, page(change, *names))


def of(name: str):
    """Whether a row is one of a system of the page."""
    system, pattern = SYSTEMS[name]
    return lambda r: (
        r.point.system == system
        and r.point.pattern == pattern(r.point.seq_len).to_dict()
    )


def at(about: study.Study, name: str, n: int, group: str = suites.LANDSCAPE):
    """The row of a system at a length."""
    return next(
        r
        for r in about.rows(group=group)
        if of(name)(r) and r.point.seq_len == n and r.median
    )


def as_fast():
    """Local and global blocks take as long as the window at the longest length, but for
    a thousandth.
    """
    window, other = (
        at(page(), name, 16384).median
        for name in ("Sliding window", "Local and global")
    )
    return slower(1.001 * window / other, of("Local and global"))


def wrong_row(what: str) -> dict:
    reason = f"{what} is off by 1.3e+00, allowed 5.0e-06"
    return LOST | {"status": "incorrect", "reason": reason, "errors": {what: 1.3}}


def wrong(name: str, passes: str = "fwd"):
    what, picked = "out" if passes == "fwd" else "dq", of(name)
    return lambda r: (
        replace(r, **wrong_row(what)) if picked(r) and r.point.passes == passes else r
    )


def order(change=None, *names: str, n: int = 16384) -> list[tuple[int, str]]:
    found = shown(change, *names).names["each"][n]
    return [*zip(found["rank"], found.variant)]


def finding(change=None) -> list[str]:
    """The lines of the page's finding."""
    return shown(change).texts[0].replace("- ", "", 1).split("\n- ")


def test_the_ranking_follows_the_rows():
    names = [
        "Sliding window",
        "Local and global",
        "LongNet from 256",
        "FlexAttention",
        "BigBird",
    ]
    names += ["Window of 2,048", "LongNet from 2,048", "Dense SDPA"]
    assert order() == [
        *enumerate(names, 1),
        (8, "Dense, ours"),
    ]  # made-up rows of dense attention take as long
    assert order(slower(10, of("Sliding window")))[-4] == (6, "Sliding window")
    assert order(slower(2, of("Dense SDPA")), n=4096)[-2:] == [
        (7, "Dense, ours"),
        (8, "Dense SDPA"),
    ]
    tied = order(as_fast())
    assert tied[:3] == [
        (1, "Sliding window"),
        (1, "Local and global"),
        (3, "LongNet from 256"),
    ], "one rank"


def test_the_answer_follows_the_rows():
    first = finding()
    assert len(first) == 8 and first[0].startswith(
        "**16,384 tokens, forward: Window of 2,048, which is advised "
    )
    assert first[1].startswith("**Fastest** is Sliding window (blocks of 64: window 2)")
    assert first[1].endswith("It computes 1.9 % of the query–key pairs.")
    quick, dense = (at(page(), x, 16384) for x in ("Sliding window", "Dense SDPA"))
    factor = tables.number(page().ratio(dense, quick).value, 2)
    assert f" {tables.number(quick.median * 1e3)} ms (" in first[1]
    assert f"{factor} times as fast as dense" in first[1]
    other = finding(slower(10, of("Sliding window")))
    assert "**Fastest** is Local and global" in other[1]
    tied = finding(as_fast())[1]
    assert "Local and global is within noise of it" in tied
    costs = {line[0].text: line[5] for line in shown().table("Ranked").rows}
    assert "within noise" in costs["Dense, ours"].sub
    assert costs["Dense SDPA"] is None
    assert re.search(
        r"\*\*A visible pair\*\* costs .* what it costs in dense attention, at 16,384 tokens",
        first[3],
    )
    none = finding(lambda r: replace(r, status="crashed", reason="gone"))
    assert none[0].endswith("was timed.")


def test_training_times_are_those_of_the_right_systems_beside_dense():
    lines = shown(wrong("BigBird")).table("Training").rows
    assert [line[1] for line in lines] == [1024] * 5 + [4096] * 7
    sparse = {
        "Sliding window",
        "Local and global",
        "LongNet from 256",
        "LongNet from 2,048",
        "Window of 2,048",
    }
    assert {line[0] for line in lines} == {"Dense SDPA", "Dense, ours"} | sparse
    there = page(wrong("BigBird"))
    dense, window = (
        at(there, name, 4096, suites.LANDSCAPE_TRAINING)
        for name in ("Dense SDPA", "Sliding window")
    )
    line = next(line for line in lines if line[:2] == ("Sliding window", 4096))
    assert line[2].text == tables.number(window.median * 1e3)
    assert line[4].text == f"{tables.number(there.ratio(dense, window).value)}×"
    assert next(line for line in lines if line[:2] == ("Dense SDPA", 4096))[4] is None


def test_a_wrong_system_is_named_with_its_error_and_has_no_rank():
    change = wrong("BigBird")
    assert "BigBird" not in dict(map(reversed, order(change)))
    found = shown(change)
    assert "wrong: BigBird" in finding(change)[4]
    line = next(r for r in found.table("Without a rank").rows if r[0] == "BigBird")
    assert (
        line[1].text == "wrong" and "out is off by 1.3e+00, allowed 5.0e-06" in line[2]
    )
    drawn = [label for labels in found.labels for label in labels]
    assert "BigBird" not in drawn and drawn.count("Sliding window") == 3
    assert [r[0] for r in found.table("Data: time").rows].count("BigBird") == 0
    assert [r[0] for r in shown().table("Data: time").rows].count("BigBird") == 3


def test_one_wrong_length_or_gradient_costs_the_rank_at_every_length():
    change = wrong("BigBird", "fwd+bwd")
    assert "BigBird" in dict(map(reversed, order())) and "BigBird" not in dict(
        map(reversed, order(change))
    )
    why = next(
        r for r in shown(change).table("Without a rank").rows if r[0] == "BigBird"
    )[2]
    assert why.startswith("output right, gradients wrong: dq is off by 1.3e+00")

    def one_length(r):
        return wrong("BigBird")(r) if r.point.seq_len == 1024 else r

    assert "BigBird" not in dict(map(reversed, order(one_length)))


def beside(change=None, *names: str) -> list[tuple]:
    """(package, tokens, pass, check, reason or error, time ratio) of the table of
    packages.
    """
    rows = shown(change, *names).table("Beside the packages").rows
    return [
        (r[0].text, r[2], r[3], r[4].text, r[4].sub, r[5] and r[5].text) for r in rows
    ]


def test_a_package_is_beside_this_library_on_its_own_function():
    found = beside(None, "torchscale_dilated")
    assert [x[:4] for x in found] == [
        ("torchscale", n, what, "correct")
        for n, what in (
            (4096, "forward"),
            (16384, "forward"),
            (4096, "training"),
            (4096, "training, causal"),
        )
    ]
    assert [x[5] for x in found] == ["1.50×", "1.50×", "1.50×", None], (
        "causal is checked alone"
    )
    note = shown(None, "torchscale_dilated").table("Beside the packages").note
    assert "torch's own kernel stands in for flash-attn in torchscale." in note
    assert (
        "Absent: dilated-attention-pytorch (`make report PEERS=1` installs it); local-attention ("
        in note
    )
    assert "torchscale" not in [
        name for _, name in order(None, "torchscale_dilated", n=4096)
    ], "no rank"


def test_a_wrong_package_is_shown_with_its_error():
    def wrong_gradients(r):
        return (
            replace(r, **wrong_row("dq"))
            if r.option("version") and r.point.passes == "fwd+bwd"
            else r
        )

    forward, _, training, causal = beside(wrong_gradients, "torchscale_dilated")
    assert forward[3] == "correct" and forward[5] == "1.50×"
    assert {x[3:4] + x[5:] for x in (training, causal)} == {("incorrect", None)}
    assert training[4] == "dq is off by 1.3e+00, allowed 5.0e-06"
    notes = [
        shown(x, "torchscale_dilated").table("Beside the packages").note
        for x in (None, wrong_gradients)
    ]
    assert [
        "torchscale takes no gradient of the weights" in note for note in notes
    ] == [False, True]


def test_generation_and_documents_follow_the_rows():
    found = shown()
    lines = found.table("Data: a step").rows
    assert (
        len(lines) == 12 == len({(line[0], line[1]) for line in lines})
        and lines[-1][1] == 65536
    )
    row = next(
        r for r in made() if r.point.system == "generation" and r.point.seq_len == 65520
    )
    rate = STEPS / row.median
    layer = "One layer of 8 heads of 64 at position 65,536"
    assert (
        f"{layer}: Dense {tables.number(rate)} tokens per second, 64.0 MiB"
        in found.text
    )
    assert (
        any(value == pytest.approx(rate) for value in found.drawn)
        and 65520 / 2**10 in found.drawn
    )
    ratios = [line[3] for line in found.table("Packed documents").rows]
    assert len(ratios) == 3 and all(ratio.text.startswith("1.1") for ratio in ratios)
    models, crashed = ("generation", "packed"), LOST | {"status": "crashed"}
    lost = shown(lambda r: replace(r, **crashed) if r.point.system in models else r)
    assert "One layer of" not in lost.text and len(lost.labels) == 1

    def without_the_longest(r):
        gone = (
            r.point.system == "generation"
            and r.point.seq_len == 65520
            and r.point.pattern["kind"] != "dense"
        )
        return replace(r, **LOST | {"status": "oom"}) if gone else r

    said = shown(without_the_longest).text
    assert re.search(
        r"at position 65,536: Dense [\d,.]+ tokens per second, 64.0 MiB. A window", said
    )


def test_density_and_cost_of_a_pair_are_counted():
    there = page()
    row, dense = (at(there, name, 4096) for name in ("Sliding window", "Dense SDPA"))
    count = cost.count_pairs(suites.LANDSCAPE_WINDOW, 4096, 8)[1]
    assert cells.density(row.point) == count / (8 * 4096**2)
    ratio = there.ratio(row, dense).value * 8 * 4096**2 / count
    assert cells.pair_cost(there, row, dense).value == pytest.approx(ratio)
    lost = shown(
        lambda r: (
            replace(r, **LOST | {"status": "oom"})
            if r.point.pattern["kind"] == "dense"
            else r
        )
    )
    assert not any("Cost of a pair" in x for x in lost.table("Ranked").columns)
    assert "as fast as" not in lost.texts[0].splitlines()[0]
    note = shown().table("Ranked").note
    pairs = cost.count_pairs(suites.landscape_ladder(16384), 16384, 8)
    assert (
        f"LongNet from 256 shows {100 * (pairs[0] / pairs[1] - 1):.1f} % more" in note
    )
    ladder = suites.landscape_ladder(4096)
    assert (ladder.segment_lengths, ladder.dilation_rates) == (
        (256, 1024, 4096),
        (1, 4, 16),
    )


@pytest.mark.parametrize(
    "name, value", [("heads", 4), ("head_dim", 128), ("dtype", "bfloat16")]
)
def test_each_parameter_changes_the_points(name, value):
    points = Shown(NAME, page(), seq_lens=[2048], **{name: value}).points
    assert {*points[name]} == {value}
    assert 2048 in {*points.seq_len[points.group == NAME]}

"""The judge: what it says of planted implementations, its facts about packages, and its
doubles, each against the contract of the operator that it stands for.
"""

import inspect
from types import SimpleNamespace

import adapters
import cells
import flash_doubles
import judge
import pytest
import torch
from reporting import run_in_this_process
from ringlab import Dense, cli, reference
from ringlab.blocks import from_mask
from ringlab.report import index
from statements import STATEMENTS

PLANTED = """
import os, time
import torch, torch.distributed as dist
from cells import Adapter
from torch.distributed.nn.functional import all_gather

def right(call, causal=None):
    s, rows = call.statement, call.rows()
    q, k, v = call.shards(rows)
    k, v = (torch.cat(all_gather(x.contiguous()), 1) for x in (k, v))
    seen = torch.arange(s.n) <= rows[:, None] if causal is None else None
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(*(x.transpose(1, 2) for x in (q, k, v)), seen)
    return out.transpose(1, 2), rows, None

def wrong(call):
    return right(call, causal=False)

def refuses(call):
    raise ValueError("no such attention")

def breaks(call):
    return torch.ones(2) @ torch.ones(3)

def hangs(call):
    time.sleep(100)

def crashes(call):
    os.kill(os.getpid(), 9)

def loses(call):
    out, rows, lse = right(call)
    return out.detach().requires_grad_(), rows, lse

def imports(call):
    import nothing_of_this_name

run = (right, wrong, refuses, breaks, hangs, crashes, loses, imports)
ADAPTERS = [Adapter(f.__name__, f, ranks=(2,)) for f in run]
ADAPTERS += [Adapter("lacks", hangs, lacks={"causal": "README"}, ranks=(2,))]
ADAPTERS += [Adapter("takes", wrong, lacks={"causal": "README"}, taken=("causal",), ranks=(2,))]
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "TIMEOUT_S", 4.0)
    path = tmp_path / "planted.py"
    path.write_text(PLANTED)
    return path


@pytest.mark.parametrize(
    "name, status, reason",
    [
        ("right", "right", ""),
        ("wrong", "silently wrong", "out, dq, dk, dv"),
        ("refuses", "refused", "no such attention"),
        ("breaks", "does not run here", "RuntimeError"),
        ("hangs", "does not run here", "hangs"),
        ("crashes", "does not run here", "SIGKILL"),
        ("loses", "silently wrong", "dq, dk, dv"),
        ("imports", "does not run here", "nothing_of_this_name"),
        ("lacks", "not offered", "README"),
        ("takes", "not offered", "taken without an error"),
    ],
)
def test_each_end_of_a_call_has_its_status(planted, name, status, reason):
    adapter = next(a for a in cells.all_of(planted) if a.name == name)
    outcome = cells.judged(adapter, str(planted), STATEMENTS["causal"], "")
    assert outcome.status == status and reason in outcome.reason


def test_a_run_goes_on_where_it_stopped_and_its_exit_code_says_what_is_wrong(
    planted, capsys
):
    asked = {"adapter": str(planted), "statements": ["causal"], "data": planted.parent}
    assert judge.ask(["right"], **asked) == 0
    assert judge.ask(["right", "wrong"], **asked) == 1
    rows = (planted.parent / judge.NAME).read_text().splitlines()
    assert (
        len(rows) == 2 and "wrong | causal: silently wrong" in capsys.readouterr().out
    )


def test_the_command_needs_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ringlab.report.places.__file__", str(tmp_path / "a" / "b.py"))
    assert cli.main(["judge"]) == 2
    said = capsys.readouterr().err
    assert "checkout" in said and said.count("\n") == 1


def test_facts_name_what_statements_need():
    needs = {x for s in STATEMENTS.values() for x in s.needs}
    needs |= {"many ranks", "chunks over ranks"}
    for adapter in adapters.ADAPTERS:
        assert {*adapter.lacks, *adapter.taken} <= needs, adapter.name
        assert {*adapter.causes, *adapter.only} <= {*STATEMENTS, "*"}, adapter.name
        assert len(inspect.getsource(adapter.attend.func).splitlines()) <= 60
    packages = {a.package for a in adapters.ADAPTERS if not a.control} - {""}
    assert len(STATEMENTS) >= 24 and len(packages) >= 10


def call_of(q, k, v, **more):
    plain = {"is_causal": False, "softmax_scale": None}
    return SimpleNamespace(q=q, k=k, v=v, **plain | more)


@pytest.fixture
def a100(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 0))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (3, 4), (-1, 2)])
def test_windows_and_soft_caps_of_the_double_are_those_of_flash_attn(
    a100, window, softcap
):
    """Its documentation: query i sees keys from i - left to i + right, both included."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 24, 2, 8).bfloat16() for _ in range(4))
    names = "window_size_left", "window_size_right"
    call = call_of(q, k, v, softcap=softcap, **dict(zip(names, window)))
    out, lse, *_ = flash_doubles.forward(call, False)
    call.dout, call.out, call.softmax_lse = dout, out, lse
    call.dq = call.dk = call.dv = None
    call.deterministic = False
    _, *grads = flash_doubles.backward(call, False)

    distance = torch.arange(24)[None] - torch.arange(24)[:, None]
    before, after = (24 if x < 0 else x for x in window)
    seen = (-before <= distance) & (distance <= after)
    pattern = from_mask(seen, block_size=1)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    ref, _ = reference.attention(*leaves, pattern, softcap=softcap or None)
    ref.backward(dout.double())
    assert reference.error(out, ref, 1.0) < 1e-2
    for grad, leaf in zip(grads, leaves):
        assert reference.error(grad, leaf.grad, 0.1) < 2e-2


def test_packed_documents_of_the_double_stand_alone(a100):
    """cu_seqlens of int32; rows beyond max_seqlen are not reached."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, 2, 8).bfloat16() for _ in range(3))
    limits = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    sizes = {"cu_seqlens_q": limits, "cu_seqlens_k": limits}
    sizes |= {"max_seqlen_q": 13, "max_seqlen_k": 13}
    call = call_of(q, k, v, **sizes | {"is_causal": True})
    out, lse, *_ = flash_doubles.varlen_forward(call, False)
    for rows in (slice(0, 7), slice(7, 20)):
        parts = [t[None, rows].double() for t in (q, k, v)]
        ref, ref_lse = reference.attention(*parts, Dense(), causal=True)
        assert reference.error(out[None, rows], ref, 1.0) < 1e-2
        assert reference.error(lse[None, :, rows], ref_lse, 1.0) < 1e-5
    call.max_seqlen_q = 9
    short, *_ = flash_doubles.varlen_forward(call, False)
    assert (short[16:] == flash_doubles.GARBAGE).all() and short[7:16].equal(out[7:16])
    call.cu_seqlens_q = limits.long()
    with pytest.raises(RuntimeError, match="must have dtype int32"):
        flash_doubles.varlen_forward(call, False)


def test_the_tutorial_finds_its_fault():
    names = {}
    run_in_this_process(judge.HERE / "your-own.ipynb", None, {}, names=names)
    (row,) = judge.read(names["folder"])
    assert row["status"] == "silently wrong"


def test_the_page_of_the_stored_cells_is_fair():
    """Each red cell has a cause, each control its fault, and ringlab none; enough ran."""
    shown = {}
    run_in_this_process(judge.HERE / "judge.ipynb", None, {}, names=shown)
    cells, wrong, adapter = (shown[x] for x in ("cells", "wrong", "adapter"))
    assert all(
        adapter[x].cause(s) for x, s in zip(wrong.implementation, wrong.statement)
    )
    assert not (wrong.title == "ringlab").any()
    controls = {a.name for a in adapters.ADAPTERS if a.control}
    assert len(controls) >= 3 and controls <= {*wrong.implementation}
    ran = shown["ran"][~shown["ran"].title.isin(["ringlab"])]
    counts = ran.groupby("title").size()
    assert counts.sum() >= 150 and (counts >= 6).sum() >= 10
    assert len(cells) > 1000


def test_the_index_links_to_the_page_and_takes_it_for_no_profile(tmp_path):
    (tmp_path / "judge" / "data").mkdir(parents=True)
    for name in ("judge.html", "judge.md", "data/cells.jsonl"):
        (tmp_path / "judge" / name).write_text("")
    page, text = (path.read_text() for path in index.write_index(tmp_path))
    assert 'href="judge/judge.html"' in page and "(judge/judge.md)" in text
    assert "<h2" not in page

"""The judge: what it says of planted implementations, its facts about packages, and its
doubles, each against the contract of the operator that it stands for.
"""

import inspect
from importlib import import_module
from itertools import pairwise

import adapters
import cells
import flash_doubles
import judge
import pytest
import torch
from reporting import run_in_this_process
from ringlab import cli, reference
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


@pytest.fixture
def flash(monkeypatch):
    """The double of flash_attn.flash_attn_interface."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 0))
    with flash_doubles.placed(flash_doubles.flash_attn_2()):
        yield import_module("flash_attn.flash_attn_interface")


def near(found, right):
    return reference.error(found, right.detach(), 0.1) < 3e-2  # both in bf16


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "causal, before, after, softcap",
    [
        (False, -1, -1, 0.0),
        (True, -1, -1, 2.0),
        (False, 3, 4, 2.0),
        (False, -1, 2, 0.0),
        (True, 4, 6, 0.0),
    ],
)
def test_the_double_of_flash_attn_is_what_its_documentation_says(
    flash, causal, before, after, softcap, kv_heads
):
    """Query i sees keys i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right,
    both included; -1 has no end. Beside it: ring-flash-attn's llama3, which is right.
    """
    torch.manual_seed(0)
    limits = torch.tensor([[0, 7, 7, 20], [0, 9, 12, 20]]).int()
    q, dout = torch.randn(2, 20, 4, 8).bfloat16()
    k, v = torch.randn(2, 20, kv_heads, 8).bfloat16()
    scale, half = 8**-0.5, (q, k, v)
    options = 0.0, scale, causal, before, after, softcap, None
    packed = *limits, 13, 9
    out, lse, *_ = flash._flash_attn_varlen_forward(*half, *packed, *options)
    grads = [torch.empty_like(t) for t in half]
    saved = dout, *half, out, lse, *grads
    flash._flash_attn_varlen_backward(*saved, *packed, *options, False)

    left, right = (99 if x < 0 else x for x in (before, 0 if causal else after))
    seen = torch.zeros(20, 20, dtype=torch.bool)
    for (a, b), (c, d) in zip(*map(pairwise, limits)):
        shift = (d - c) - (b - a)
        seen[a:b, c:d] = True
        seen[a:b, c:d] = seen[a:b, c:d].tril(shift + right).triu(shift - left)
    leaves = [t.double().requires_grad_() for t in half]
    q, k, v = (t.repeat_interleave(4 // t.shape[1], 1) for t in leaves)
    scores = torch.einsum("ihd,jhd->hij", scale * q, k)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    some = seen.any(1)
    scores = scores.masked_fill(~seen, -torch.inf)[:, some]
    ref = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    ref.backward(dout[some].double())
    assert near(out[some], ref) and not out[~some].any()
    assert reference.error(lse[:, some], scores.logsumexp(-1).detach(), 1.0) < 1e-5
    assert lse[:, ~some].isposinf().all()
    assert all(map(near, grads, (leaf.grad for leaf in leaves)))
    short, *_ = flash._flash_attn_varlen_forward(*half, *limits, 9, 9, *options)
    assert (short[16:] == flash_doubles.GARBAGE).all() and short[:16].equal(out[:16])


def test_the_doubles_of_torchs_flash_attention_are_its_attention(flash):
    """Beside them: context_parallel of torch, which is right."""
    *qkv, dout = torch.randn(4, 1, 12, 2, 8).bfloat16().transpose(2, 3)
    out, lse, *rest = flash_doubles.sdp_forward(*qkv, 0.0, True, scale=0.5)
    saved = dout, *qkv, out, lse, *rest[:4], 0.0, True
    grads = flash_doubles.sdp_backward(*saved, scale=0.5)
    leaves = [t.double().requires_grad_() for t in qkv]
    attend = torch.nn.functional.scaled_dot_product_attention
    ref = attend(*leaves, is_causal=True, scale=0.5)
    ref.backward(dout.double())
    right = ref, *(leaf.grad for leaf in leaves)
    assert all(map(near, (out, *grads), right))
    with pytest.raises(NotImplementedError, match="dropout"):
        flash_doubles.sdp_forward(*qkv, 0.1)


HALF = torch.zeros(1, 4, 6, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "q, k, said",
    [
        (HALF.float(), HALF.float(), "fp16 and bf16"),
        (HALF, HALF.half(), "same dtype"),
        (HALF[..., :12], HALF[..., :12], "multiple of 8"),
        (HALF, HALF[:, :, :4], "must divide"),
        (HALF[..., 1:9], HALF[..., 1:9], "misaligned"),
    ],
)
def test_the_double_refuses_what_the_operator_refuses(flash, q, k, said):
    with pytest.raises(RuntimeError, match=said):
        flash.flash_attn_func(q, k, k)


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

"""Across ranks: every scheme over every layout is the one-device answer, and moves what was planned."""

import random
from dataclasses import replace

import pytest
import torch
from ring_cases import call, compiled, mismatch, parity, peaks_of_a_shard, tensors, two_meshes, without_private_names
from ringlab import attention, reference
from ringlab.engine import Execution
from ringlab.engine.autograd import local_attention
from ringlab.patterns import Dense, Dilated
from ringlab.ring import (  # fmt: skip
    SCHEMES,
    Problem,
    Simulated,
    choose,
    comm,
    contiguous,
    counting,
    hilbert,
    plan_rank,
    rank,
    schemes,
    striped,
    zigzag,
)
from ringlab.ring import rank as ring_rank
from ringlab.ring.launch import launch
from test_ring_plan import any_layout, any_pattern

BOUND = {torch.float64: 1e-12, torch.float32: 5e-6}


def errors(found, q, k, v, dout, dlse, pattern, layout, causal) -> list[float]:
    """DESIGN's error of out, lse, dq, dk, dv against the oracle; along the curve where the layout has one."""
    if layout.grid is not None:
        order = torch.cat([layout.positions(r) for r in range(layout.ranks)])
        q, k, v, dout = (t[:, order] for t in (q, k, v, dout))
        found = [t[:, :, order] if i == 1 else t[:, order] for i, t in enumerate(found)]
        dlse = None if dlse is None else dlse[:, :, order]
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    out, lse = reference.attention(q, k, v, pattern, causal=causal)
    alive = lse > -torch.inf
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse[alive] * dlse.double()[alive]).sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    floor = reference.gradient_floor(q, k, dout)
    if not torch.equal(found[1] > -torch.inf, alive):
        return [float("inf")]
    apart = [reference.error(found[0], out, 1.0), float((found[1].double() - lse)[alive].detach().norm())]
    return apart + [reference.error(a, b, floor) for a, b in zip(found[2:], grads)]


def any_case(rng: random.Random, scheme: str, ranks: int):
    layout = any_layout(rng, ranks, rng.randint(ranks, 70))
    dense = (layout.kind == "striped" and scheme != "ulysses") or rng.random() < 0.25
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    while scheme == "ulysses" and heads < ranks:
        heads += kv_heads
    causal = layout.grid is None and rng.random() < 0.5
    return Dense() if dense else any_pattern(rng), layout, causal, heads, kv_heads


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_the_oracle(scheme, ranks):
    rng = random.Random(f"{scheme} {ranks}")
    for i in range(8):
        pattern, layout, causal, heads, kv_heads = any_case(rng, scheme, ranks)
        dtype = torch.float64 if i % 4 else torch.float32
        q, k, v, dout, dlse = tensors(layout, heads, kv_heads, 8, dtype, i, batch=rng.choice([1, 2]))
        dlse = dlse if rng.random() < 0.5 else None
        found = call(q, k, v, dout, dlse, pattern, layout, causal, scheme, Simulated(ranks))
        worst = max(errors(found, q, k, v, dout, dlse, pattern, layout, causal))
        assert worst <= BOUND[dtype], (worst, pattern, layout, causal, heads, kv_heads)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pattern", [Dilated([64, 256], [1, 2]), Dense()])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision_stays_within_twice_a_dense_call(scheme, pattern, ranks):
    layout = contiguous(256 * ranks, ranks)
    q, k, v, dout, _ = tensors(layout, 4, 4, 32, torch.bfloat16, 0)
    found = call(q, k, v, dout, None, pattern, layout, True, scheme, Simulated(ranks))
    limit = reference.tolerance(q, k, v, dout, causal=True)
    worst = dict(zip(("out", "lse", "dq", "dk", "dv"), errors(found, q, k, v, dout, None, pattern, layout, True)))
    for name in ("out", "dq", "dk", "dv"):
        assert worst[name] <= limit[name], (name, worst, limit)
    assert found[0].dtype == found[2].dtype == torch.bfloat16 and found[1].dtype == torch.float32


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "plan"])
def test_half_precision_is_rounded_once(scheme):
    """However many ranks add to a result: their parts are summed in fp32."""
    q, k, v, *_ = tensors(contiguous(512, 16), 2, 2, 16, torch.bfloat16, 0)
    exact = attention(q.double(), k.double(), v.double(), Dense())
    rounding = (exact.bfloat16().double() - exact).norm()
    out = attention(q, k, v, Dense(), group=Simulated(16), scheme=scheme)
    assert (out.double() - exact).norm() <= 1.3 * rounding


@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast_changes_nothing(scheme):
    given, layout = tensors(contiguous(40, 2), 2, 2, 8, torch.float32, 0), contiguous(40, 2)
    want = call(*given, Dense(), layout, True, scheme, Simulated(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = call(*given, Dense(), layout, True, scheme, Simulated(2))
    assert all(map(torch.equal, found, want))


def test_one_rank_is_the_local_result_bit_for_bit():
    q, k, v, dout, dlse = tensors(contiguous(60, 1), 4, 2, 8, torch.float32, 0)
    pattern = Dilated([16, 32], [1, 2])
    a = call(q, k, v, dout, dlse, pattern, "contiguous", True, "ring", Simulated(1))
    with counting() as traffic:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = local_attention(*leaves, pattern, causal=True, scale=8**-0.5, backend="auto", execution=Execution())
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))
    assert all(torch.equal(x, y) for x, y in zip(a, (out, lse, *grads))) and traffic.total == 0


# ---------------------------------------------------------------------------------------------------------------------
# what moves


def traffic_of(pattern, layout, causal, scheme, heads=2, kv_heads=2, d=8, dtype=torch.float32):
    """Bytes by (from, to), forward and backward."""
    q, k, v, dout, _ = tensors(layout, heads, kv_heads, d, dtype, 0)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with counting() as forward:
        out, _ = comm_attend(q, k, v, pattern, layout, causal, scheme)
    with counting() as backward:
        torch.autograd.grad(out, (q, k, v), dout)
    return forward, backward


def comm_attend(q, k, v, pattern, layout, causal, scheme):
    from ringlab.ring.group import attend as over

    return over(q, k, v, pattern, causal=causal, scale=q.shape[3] ** -0.5, backend="auto", execution=Execution(),
                group=Simulated(layout.ranks), scheme=scheme, layout=layout)  # fmt: skip


def test_a_plan_moves_as_many_bytes_as_it_says():
    rng = random.Random(5)
    for _ in range(12):
        pattern, layout, causal, heads, kv_heads = any_case(rng, "plan", rng.choice([2, 3, 4]))
        forward, backward = traffic_of(pattern, layout, causal, "plan", heads, kv_heads)
        planned = {}
        for rank in range(layout.ranks):
            for to, rows in enumerate(plan_rank(Problem(pattern, layout, causal, heads, kv_heads), rank).sent):
                if rows:
                    planned[rank, to] = rows * 2 * 8 * 4
        assert forward.sent == planned
        assert backward.sent == {(b, a): size for (a, b), size in planned.items()}, "the same rows, the other way"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dense_schemes_move_their_closed_forms(ranks):
    """s rows a shard of m bytes; gradients of bf16 travel in fp32 (c = 2)."""
    n, layout = 16 * ranks, contiguous(16 * ranks, ranks)
    shard = n // ranks * 2 * 2 * 8 * 2  # s * m in bf16: K and V of 2 heads of 8
    for scheme, backward_shards in (("ring", 1 + 2), ("all_gather", 1 + 2), ("plan", 2)):
        forward, backward = traffic_of(Dense(), layout, False, scheme, dtype=torch.bfloat16)
        assert all(forward.from_rank(r) == (ranks - 1) * shard for r in range(ranks)), scheme
        assert all(backward.from_rank(r) == (ranks - 1) * shard * backward_shards for r in range(ranks)), scheme
    forward, _ = traffic_of(Dense(), layout, True, "ring", dtype=torch.bfloat16)
    sent = [forward.from_rank(r) for r in range(ranks)]
    assert sent == [(r + 1) * shard for r in range(ranks - 1)] + [0], "no hop that no query needs"


def test_only_planned_rows_are_read_and_all_of_them():
    """NaN in every row that is neither owned nor planned changes nothing; NaN in any planned one reaches the output."""
    pattern, layout, heads, kv_heads = Dilated([8, 32], [1, 3]), contiguous(32, 4), 2, 2
    problem = Problem(pattern, layout, False, heads, kv_heads)
    q, k, v, *_ = tensors(layout, heads, kv_heads, 8, torch.float64, 0)
    for rank in range(4):
        blocks = [block for each in plan_rank(problem, rank).receive for block in each]
        planned = [(head, x) for block in blocks for head, where in block.members() for x in where]
        mine = set(layout.ranges(rank)[0])
        poisoned = k.clone(), v.clone()
        for head in range(kv_heads):
            for x in range(layout.n):
                if x not in mine and (head, x) not in planned:
                    for t in poisoned:
                        t[:, x, head] = torch.nan
        out = local_attention(q, *poisoned, pattern, causal=False, scale=1.0, backend="eager", execution=Execution())[0]
        clean = comm_attend(q, k, v, pattern, layout, False, "plan")[0]
        got = comm_attend(q, *poisoned, pattern, layout, False, "plan")[0]
        own = layout.shard(got, rank)
        assert torch.equal(own, layout.shard(clean, rank)) and own.isfinite().all() and out.shape == got.shape
        for head, x in planned[:: max(1, len(planned) // 6)]:
            single = v.clone()
            single[:, x, head] = torch.nan
            assert not layout.shard(comm_attend(q, k, single, pattern, layout, False, "plan")[0], rank).isfinite().all()


def test_auto_takes_the_scheme_that_moves_least_and_says_why():
    assert choose(Problem(Dilated([16], [1]), contiguous(64, 4), True, 8, 8)).scheme == "plan"
    assert choose(Problem(Dense(), contiguous(64, 1), True, 8, 8)).why == "one rank has all rows, and nothing moves"
    assert choose(Problem(Dense(), zigzag(64, 4), True, 8, 8)).scheme == "ulysses"
    grouped = choose(Problem(Dense(), zigzag(64, 4), True, 32, 2))
    assert grouped.scheme == "ring" and "exchanging heads would move" in grouped.why
    assert choose(Problem(Dilated([16], [1]), striped(64, 4), True, 8, 8)).scheme == "ulysses"


# ---------------------------------------------------------------------------------------------------------------------
# mutants: each of these mistakes is in a public system, and each must be seen


def later_keys(monkeypatch):
    """Causality forgotten between ranks: later shards are seen."""
    right = Problem.shared
    monkeypatch.setattr(Problem, "shared", lambda self, *a: right(replace(self, causal=False), *a))


def unshifted_stripes(monkeypatch):
    """The square mask of a later stripe not shifted by a row: each query sees a key one step ahead."""
    right = rank._striped

    def wrong(problem, rank, source):
        return [replace(m, queries=replace(m.queries, first=(0, 0))) for m in right(problem, rank, source)]

    monkeypatch.setattr(rank, "_striped", wrong)


def swapped_gradients(monkeypatch):
    right = ring_rank.shard_of
    monkeypatch.setattr(schemes, "shard_of", lambda *a: right(*a)[::-1] if len(a) == 4 else right(*a))


def local_positions(monkeypatch):
    from ringlab.engine import execute

    right = execute.plan_for
    monkeypatch.setattr(execute, "plan_for", lambda q, k, pattern, cached, n=None, chunk=None: right(
        q, k, pattern, cached, n, chunk and range(len(chunk))))  # fmt: skip


def skipped_hop(monkeypatch):
    right = ring_rank.Rank.meetings
    monkeypatch.setattr(ring_rank.Rank, "meetings", lambda self, source: [] if source == (self.rank + 1) % 3 else right(
        self, source))  # fmt: skip


def slicing_gather(monkeypatch):
    """An all-gather whose backward keeps its own slice: what others computed for a shard is dropped."""
    right = ring_rank.Rank.add_backward

    def wrong(self, calls, reads, source, dq, into):
        scratch = into if isinstance(into, torch.Tensor) else tuple(map(torch.zeros_like, into))
        right(self, calls, reads, source, dq, scratch)

    monkeypatch.setattr(ring_rank.Rank, "add_backward", wrong)


def forgotten_home_hop(monkeypatch):
    right = comm._Delivery.deliver

    def wrong(self):
        late = [r for r in self.requests if isinstance(r, comm.Exchange) and any(
            len(t) and t[0].dtype == torch.float64 for t in r.receive.values())]  # fmt: skip
        right(self)
        for request in late[:1]:
            for received in request.receive.values():
                for t in received:
                    t.zero_()

    monkeypatch.setattr(comm._Delivery, "deliver", wrong)


@pytest.mark.parametrize(
    "mutant, scheme, pattern, layout, causal",
    [
        (later_keys, "ring", Dilated([10, 30], [1, 3]), contiguous(40, 3), True),
        (unshifted_stripes, "ring", Dense(), striped(40, 3), True),
        (swapped_gradients, "plan", Dilated([10, 40], [1, 2]), contiguous(40, 3), False),
        (local_positions, "plan", Dilated([7, 20], [2, 3]), contiguous(40, 3), False),
        (skipped_hop, "ring", Dense(), contiguous(40, 3), False),
        (slicing_gather, "all_gather", Dense(), contiguous(40, 3), False),
        (forgotten_home_hop, "ring", Dense(), contiguous(40, 3), False),
    ],
)
def test_mutants_are_caught(monkeypatch, mutant, scheme, pattern, layout, causal):
    given = tensors(layout, 2, 2, 8, torch.float64, 0)
    right = call(*given, pattern, layout, causal, scheme, Simulated(3))
    assert max(errors(right, *given, pattern, layout, causal)) <= 1e-12
    mutant(monkeypatch)
    monkeypatch.setattr("ring_cases.Execution", lambda: Execution(cache=False))
    wrong = call(*given, pattern, layout, causal, scheme, Simulated(3))
    assert max(errors(wrong, *given, pattern, layout, causal)) > 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# real processes over gloo


@pytest.mark.parametrize("ranks", [2, 3])
def test_gloo_ranks_are_the_simulated_ones(ranks):
    cases = []
    for i, scheme in enumerate(SCHEMES):
        for layout, pattern in ((contiguous(37, ranks), Dilated([8, 20], [1, 3])), (zigzag(36, ranks), Dense()),
                                (hilbert(4, 9, ranks), Dilated([12], [2], "head_groups", "branch"))):  # fmt: skip
            causal = layout.grid is None and i % 2 == 0
            cases.append((pattern, layout, causal, 4, 2, scheme, torch.float64, 8, i, i % 2 == 1))
    everyone = launch(parity, ranks, cases)
    for i, (pattern, layout, causal, heads, kv_heads, scheme, dtype, d, seed, with_lse) in enumerate(cases):
        q, k, v, dout, dlse = tensors(layout, heads, kv_heads, d, dtype, seed)
        with counting() as traffic:
            want = call(q, k, v, dout, dlse if with_lse else None, pattern, layout, causal, scheme, Simulated(ranks))
        for part in range(5):
            got = layout.unshard([each[i][0][part] for each in everyone], 2 if part == 1 else 1)
            assert torch.equal(got, want[part]), (scheme, layout, part)
        assert [each[i][1] for each in everyone] == [traffic.from_rank(r) for r in range(ranks)]
    copied = launch(parity, ranks, cases, "cpu", True)
    same = [torch.equal(a, b) for x, y in zip(everyone, copied) for (u, *_), (w, *_) in zip(x, y) for a, b in zip(u, w)]
    assert all(same) and len(same) == 5 * ranks * len(cases)
    again, header = launch(parity, ranks, cases[:1] * 2), 24 * (ranks - 1)  # to each other rank, in each pass
    assert [[control for *_, control in each] for each in again] == [[2 * header + 8 * (ranks - 1), 2 * header]] * ranks


ONE, OTHER = Dilated([12, 48], [1, 2]), Dilated([12, 48], [1, 2], offsets="block")


@pytest.mark.parametrize(
    "calls, order, what",
    [
        ([(ONE, False), (ONE, True)], ((0, 1), (1, 0)), "causal is False on rank 0, True on rank 1"),
        ([(ONE, False), (OTHER, False)], ((0, 1), (1, 0)), f"pattern is {ONE} on rank 0, {OTHER} on rank 1"),
        ([(ONE, False), (ONE, True)], ((1, -2), (-2, 1)), "pass is forward on rank 0, backward on rank 1"),
        ([(ONE, False)] * 2, ((-2, -1), (-1, -2)), "forward call is number 1 on rank 0, number 2 on rank 1"),
    ],
)
def test_calls_in_another_order_are_told_on_every_rank(calls, order, what):
    """Calls that the ranks have made before in one order."""
    told = launch(mismatch, 2, [calls], contiguous(48, 2), order, timeout_s=30.0)
    assert told == [f"ranks disagree about what is computed: {what}"] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_little_more_than_its_shard(ranks):
    """Peak bytes of a forward by the bytes of a shard of q, k, v and out: what is received, and a piece at a time."""
    n, heads, d = 8192, 8, 64
    ladder = Dilated([n // 4, n], [1, 4])
    cases = [(Dense(), "ring"), (Dense(), "all_gather"), (ladder, "plan")]
    shard = 4 * 4 * n // ranks * heads * d
    for rank, peaks in enumerate(launch(peaks_of_a_shard, ranks, cases, n, heads, d)):
        ring, gathered, planned = (peak / shard for peak in peaks)
        plan = plan_rank(Problem(ladder, contiguous(n, ranks), False, heads, heads), rank)
        moved = 4 * 2 * d * (sum(plan.sent) + sum(plan.received)) / shard
        assert ring <= 2.1 and gathered <= 1.1 * (2 + 2 * ranks) / 4 and planned <= 1.3 + moved, (peaks, shard, moved)


def test_process_groups_are_found_without_private_functions():
    for one, other in launch(without_private_names, 2, Dilated([8, 24], [1, 2]), contiguous(24, 2)):
        assert all(map(torch.equal, one, other))


def test_a_mesh_of_two_sequences():
    pattern, layout = Dilated([8, 24], [1, 2]), contiguous(24, 2)
    found = launch(two_meshes, 4, pattern, layout, 7)
    for data in (0, 1):
        mine = [each for which, each in found if which == data]
        q, k, v, dout, dlse = tensors(layout, 4, 2, 8, torch.float64, 7 + data)
        want = call(q, k, v, dout, dlse, pattern, layout, True, "plan", Simulated(2))
        for part in range(5):
            assert torch.equal(layout.unshard([each[part] for each in mine], 2 if part == 1 else 1), want[part])


@pytest.mark.parametrize("scheme", ["plan", "ring"])
def test_compiled_and_checkpointed_steps_are_the_eager_one(scheme):
    """One graph; saving the operator's results replays no exchange, where plain checkpointing replays the forward."""
    for results, messages in launch(compiled, 2, Dilated([8, 40], [1, 2]), contiguous(40, 2), scheme):
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other))
        eager, compiled_messages, plain, selective = messages
        assert eager == compiled_messages == selective < plain

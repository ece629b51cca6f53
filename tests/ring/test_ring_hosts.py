"""Scheme plan over hosts of several ranks: a row crosses the link between two of them
once, and values stay.
"""

import random
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import two_hosts
from matrix import (
    BLOCK_SPARSE,
    DILATED,
    F32,
    F64,
    LADDER,
    Case,
    any_layout,
    drawn,
    errors,
    fits,
    judged,
)
from random_cases import seeds
from ring_cases import told
from ringlab import Dense, Simulated, attention
from ringlab.call import CallSpec
from ringlab.estimate import estimate
from ringlab.ring import Problem, contiguous, counting, plan_rank, striped, zigzag
from ringlab.ring.exchange import on_hosts, rows_moved, rows_needed
from ringlab.ring.group import Group
from ringlab.ring.launch import launch
from ringlab.ring.volume import sent_to
from test_ring_plan import any_problem, seen

SPLIT = [(4, 2), (6, 2), (6, 3)]  # ranks and hosts


def cases(ranks: int, **how):
    """Of all layouts that plan serves, causal and not, with grouped heads."""
    rng = random.Random(ranks)
    for i, pattern in enumerate((Dense(), *DILATED, *BLOCK_SPARSE[:-1:2])):
        made = [contiguous(101, ranks), zigzag(103, ranks), any_layout(rng, ranks, 90)]
        for layout in (
            (*made, striped(70, ranks), striped(71, ranks))
            if i == 0
            else made[i % 3 :][:2]
        ):
            causal = layout.grid is None and rng.random() < 0.7
            if fits(pattern, layout, causal, "plan"):
                yield Case(
                    pattern,
                    layout.n,
                    F64,
                    causal,
                    1 + i % 2,
                    4,
                    rng.choice([1, 2, 4]),
                    8,
                    seed=i,
                    layout=layout,
                    scheme="plan",
                    **how,
                )


def hosts_of(ranks: int, machines: int) -> tuple[int, ...]:
    return tuple(rank * machines // ranks for rank in range(ranks))


def problem_of(case: Case, hosts: tuple[int, ...]) -> Problem:
    return on_hosts(
        Problem(case.pattern, case.layout, case.causal, case.heads, case.kv_heads),
        "plan",
        hosts,
    )


def crossing(problem: Problem, hosts) -> dict[tuple[int, int], int]:
    """By (from, to) host the distinct rows that one needs from the other, by the
    pattern's own definition.
    """
    ranks, found = range(problem.layout.ranks), {}
    for rank in ranks:
        for source in ranks:
            if hosts[source] != hosts[rank]:
                found.setdefault((hosts[source], hosts[rank]), set()).update(
                    seen(problem, rank, source)
                )
    return {pair: len(rows) for pair, rows in found.items() if rows}


def between(sent: dict, hosts) -> dict[tuple[int, int], int]:
    """Bytes by (from, to) host."""
    found = {}
    for (a, b), size in sent.items():
        if hosts[a] != hosts[b]:
            found[hosts[a], hosts[b]] = found.get((hosts[a], hosts[b]), 0) + size
    return found


@pytest.mark.parametrize("ranks, machines", SPLIT)
def test_values_and_gradients_are_the_reference(ranks, machines):
    for case in list(cases(ranks))[ranks // machines % 2 :: 2]:
        (q, k, *rest), dout, dlse, want, bounds = judged(case)
        apart = errors(
            case.run((q, k, *rest), dout, dlse, Simulated(ranks, machines)),
            want,
            q,
            k,
            dout,
        )
        assert all(error <= bounds[name] for name, error in apart.items()), (
            case,
            apart,
        )


@pytest.mark.parametrize("ranks, machines", SPLIT)
def test_each_row_crosses_once_and_no_more_moves_than_without_hosts(ranks, machines):
    hosts, saved = hosts_of(ranks, machines), 0
    for case in list(cases(ranks, lse_cotangent=False))[ranks // machines % 2 :: 2]:
        given, problem = drawn(case), problem_of(case, hosts)
        with counting() as forward:
            case.call(*given[0], group=Simulated(ranks, machines))
        with counting() as both:
            case.run(*given, Simulated(ranks, machines))
        with counting() as usual:
            case.call(*given[0])
        shape = {"batch": case.batch, "head_dim": case.d, "dtype": F64}
        for traffic, passes in ((forward, "fwd"), (both, "fwd+bwd")):
            planned = {
                (rank, to): size
                for rank in range(ranks)
                for to, size in sent_to(
                    problem, rank, "plan", passes=passes, **shape
                ).items()
            }
            assert traffic.sent == planned, case
        row = 2 * case.batch * case.d * 8
        want = {pair: rows * row for pair, rows in crossing(problem, hosts).items()}
        assert between(forward.sent, hosts) == want, case
        back = {
            pair: both.sent.get(pair, 0) - forward.sent.get(pair, 0)
            for pair in both.sent
        }
        back = {pair: size for pair, size in between(back, hosts).items() if size}
        assert back == {(b, a): size for (a, b), size in want.items()}, case
        assert (forward.total, both.total) == (usual.total, 2 * usual.total)
        saved += sum(between(usual.sent, hosts).values()) - sum(want.values())
    assert saved > 0


def test_ranks_on_any_hosts_plan_what_is_seen():
    rng, pairs = random.Random(3), 0
    for _ in (some := seeds(6)):
        problem = any_problem(rng)
        ranks = range(problem.layout.ranks)
        problem = on_hosts(problem, "plan", tuple(rng.randrange(3) for _ in ranks))
        plans, needed = (
            [plan_rank(problem, rank) for rank in ranks],
            rows_needed(problem),
        )
        for rank, plan in enumerate(plans):
            rows = [
                (owner, head, x)
                for owner, block in plan.blocks
                for head, where in block.members()
                for x in where
            ]
            want = {
                (owner, *row)
                for owner in ranks
                if owner != rank
                for row in seen(problem, rank, owner)
            }
            assert (
                len(rows) == len(set(rows)) == plan.rows == sum(needed[rank])
                and set(rows) == want
            ), problem
            for other, theirs in enumerate(plans):
                assert plan.receive[other] == theirs.send[rank]
                assert not problem.hosts or plan.passed[other] == theirs.onward[rank], (
                    "both ends agree"
                )
            passed = plan.passing[0] or [0] * len(ranks)
            assert rows_moved(problem)[rank] == [
                a + b for a, b in zip(plan.received, passed)
            ], problem
            pairs += any(passed)
    assert pairs > len(some) / 3


def test_the_ranks_of_a_host_take_turns():
    problem = on_hosts(
        Problem(Dense(), contiguous(64, 8), False, 2, 2), "plan", hosts_of(8, 2)
    )
    assert [sum(plan_rank(problem, rank).received[4:]) for rank in range(4)] == [16] * 4


def test_hosts_that_change_nothing_are_no_part_of_a_problem():
    problem = Problem(Dense(), contiguous(64, 4), False, 2, 2)
    for scheme, hosts in (
        ("plan", (5,) * 4),
        ("plan", (3, 2, 1, 0)),
        ("plan", ()),
        ("ring", (0, 0, 1, 1)),
    ):
        assert on_hosts(problem, scheme, hosts) is problem
    assert on_hosts(problem, "plan", (7, 3, 7, 3)).hosts == (0, 1, 0, 1)
    for machines, said in (
        (3, "4 ranks do not share 3 machines evenly"),
        (0, "machines must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=said):
            Simulated(4, machines)
    with pytest.raises(
        ValueError, match="hosts must be a tuple of 4 numbers or of none"
    ):
        CallSpec(Dense(), 64, ranks=4, hosts=(0, 1))


def test_an_estimate_knows_the_hosts_of_ranks():
    hosts, n = hosts_of(4, 2), 256
    call = {
        "heads": 4,
        "head_dim": 8,
        "ranks": 4,
        "scheme": "plan",
        "passes": "fwd+bwd",
    }
    case = Case(
        Dense(),
        n,
        F32,
        heads=4,
        kv_heads=4,
        d=8,
        lse_cotangent=False,
        layout=contiguous(n, 4),
        scheme="plan",
    )
    with counting() as traffic:
        case.run(*drawn(case), Simulated(4, 2))
    found = estimate(Dense(), seq_len=n, hosts=hosts, **call)
    assert found.sent == traffic.sent
    crossed = between(found.sent, hosts)
    assert crossed[0, 1] == crossed[1, 0]
    assert (
        crossed[0, 1] < between(estimate(Dense(), seq_len=n, **call).sent, hosts)[0, 1]
    )


# --------------------------------------------------------------------------------------
# real processes


def named(name: str) -> None:
    try:
        two_hosts.kernel("unshare", two_hosts.NEW_HOST_NAME)
        socket.sethostname(name)
    except OSError:  # not root
        socket.gethostname = lambda: name


def on_machines(cases, names):
    named(names[dist.get_rank()])
    found = []
    for case in cases:
        with counting() as traffic:
            values = case.run(*case.shards(dist.get_rank()), dist.group.WORLD)
        found.append((values, traffic.sent, traffic.control))
    return found


@pytest.mark.parametrize("names", ["aabb", "abbb"])
def test_gloo_ranks_find_their_machines(names):
    """Of equal machines the bits are those of simulated ones; and three ranks of one
    beside one of another.
    """
    some = [
        case for case in cases(4) if case.pattern in (Dense(), LADDER, BLOCK_SPARSE[2])
    ][::2]
    some = [
        *some,
        replace(some[0], scheme="ring"),
        replace(some[1], lse_cotangent=False, seed=1),
    ]
    everyone = launch(on_machines, 4, some, names)
    for i, case in enumerate(some):
        found = case.joined([each[i][0] for each in everyone])
        sent = {pair: size for each in everyone for pair, size in each[i][1].items()}
        if names == "aabb":
            with counting() as traffic:
                want = case.run(*drawn(case), Simulated(4, 2))
            assert (
                all(torch.equal(found[name], t) for name, t in want.items())
                and sent == traffic.sent
            ), case
            continue
        (q, k, _), dout, _, want, bounds = judged(case)
        assert all(
            e <= bounds[name] for name, e in errors(found, want, q, k, dout).items()
        ), case
        if not case.lse_cotangent:
            shape = {
                "batch": case.batch,
                "head_dim": case.d,
                "dtype": F64,
                "passes": "fwd+bwd",
            }
            each = (
                sent_to(problem_of(case, (0, 1, 1, 1)), rank, "plan", **shape).items()
                for rank in range(4)
            )
            assert sent == {
                (rank, to): size for rank, some in enumerate(each) for to, size in some
            }
    header, hosts = 2 * 24 * 3, 8 * 3
    assert [[control for *_, control in each][:2] for each in everyone] == [
        [header + hosts, header]
    ] * 4


def unlike(hosts):
    """What this rank is told: in its first call, of documents on one rank alone; then
    with ``hosts`` by rank.
    """
    q, rank, how = (
        torch.zeros(1, 8, 2, 8),
        dist.get_rank(),
        {"group": dist.group.WORLD, "scheme": "plan"},
    )
    first = told(
        attention,
        q,
        q,
        q,
        Dense(),
        **how,
        **({"cu_seqlens": [0, 5, 24]} if rank == 0 else {}),
    )
    Group.of(dist.group.WORLD)._history.hosts = hosts[rank]
    return first, told(attention, q, q, q, Dense(), **how)


def test_ranks_whose_first_calls_or_machines_differ_are_told():
    what = (
        "pass is forward of documents on rank 0, forward on the others",
        "hosts is (0, 1, 0) on rank 2, (0, 0, 2) on the others",
    )
    said = tuple(f"ranks disagree about what is computed: {each}" for each in what)
    assert (
        launch(unlike, 3, [(0, 0, 2), (0, 0, 2), (0, 1, 0)], timeout_s=30.0)
        == [said] * 3
    )


def on_two_hosts(made, folder, cases):
    """This rank's host, and its results of each case over the link."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    made.enter(rank)
    store = dist.FileStore(f"{folder}/again", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    results = [case.run(*case.shards(rank), dist.group.WORLD) for case in cases]
    return socket.gethostname(), results


def test_attention_between_hosts_is_that_of_simulated_ranks(tmp_path):
    rng = random.Random(0)
    cases = [
        Case(
            rng.choice([Dense(), LADDER]),
            300,
            F64,
            causal=True,
            batch=1,
            heads=4,
            kv_heads=2,
            d=8,
            scheme=scheme,
            lse_cotangent=True,
            layout=contiguous(300, 2),
        )
        for scheme in ("plan", "ring", "all_gather", "ulysses")
    ]
    try:
        with two_hosts.TwoHosts() as hosts:
            everyone = launch(on_two_hosts, 2, hosts, str(tmp_path), cases)
    except two_hosts.NotAllowed as why:
        pytest.skip(str(why))
    names, results = zip(*everyone)
    assert names == two_hosts.HOSTS
    for i, case in enumerate(cases):
        want, found = case.run(*drawn(case)), case.joined([each[i] for each in results])
        for name, t in want.items():
            torch.testing.assert_close(found[name], t, rtol=1e-12, atol=1e-12)

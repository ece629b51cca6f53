"""The time of a call across ranks before it runs, in closed form; two hosts that a
shaped link joins.
"""

import json
import random
import socket
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from matrix import Case, drawn
from ringlab import Dense, Dilated, network
from ringlab.estimate import estimate
from ringlab.measure.links import Link, NotAllowed, hosts
from ringlab.meta_run import MetaCall
from ringlab.network import BETWEEN, INSIDE, Line, Network, predict
from ringlab.ring import Problem, contiguous, launch
from ringlab.ring.volume import sent_bytes

ALPHA, BETA, RATE = 1e-3, 1e8, 1e9  # seconds, bytes and FLOPs a second
LINE, WORK = Line((0, BETA), (ALPHA, 1 + ALPHA)), Line((0, RATE), (0.0, 1.0))
TWO = Network((0, 1), {BETWEEN: LINE}, {"float32": (WORK, WORK)})
LADDER = Dilated([256, 512], [1, 2])
CALL = {"heads": 4, "head_dim": 16, "ranks": 2}


def test_a_line_goes_through_what_was_measured():
    line = Line((10, 20, 40), (1.0, 2.0, 6.0))
    assert [line(x) for x in (10, 15, 20, 30, 50)] == pytest.approx(
        [1.0, 1.5, 2.0, 4.0, 8.0]
    )
    assert line(0) == 0.0 and (line.latency_s, line.per_s) == (1.0, 5.0)


def test_a_file_keeps_a_network_and_another_one_is_refused(tmp_path):
    path = tmp_path / "network.json"
    path.write_text(TWO.to_json())
    assert Network.read(path) == Network.of(asdict(TWO)) == TWO
    for text in ("no JSON", "{}", json.dumps({"hosts": [0], "lines": [], "work": {}})):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no file of python -m ringlab network"):
            Network.read(path)


@pytest.mark.parametrize(
    "scheme, rounds", [("plan", 1), ("ring", 1), ("all_gather", 1), ("ulysses", 3)]
)
def test_a_forward_takes_its_bytes_and_its_rounds(scheme, rounds):
    """The agreement first; without work the bytes of the scheme, with slow work what of
    it does not overlap.
    """
    n, pattern = 512, Dense()
    found = predict(MetaCall(pattern, scheme=scheme, **CALL), n, TWO)
    problem = Problem(pattern, contiguous(n, 2), False, 4, 4)
    sent = sent_bytes(problem, 0, scheme, batch=1, head_dim=16, dtype=torch.float32)
    assert found.exchange_s == pytest.approx((1 + rounds) * ALPHA + (24 + sent) / BETA)
    assert found.compute_s == pytest.approx(4 * 4 * 16 * n * n / 2 / RATE)
    local = (
        0
        if scheme == "ulysses"
        else min(found.compute_s / 2, found.exchange_s - ALPHA - 24 / BETA)
    )
    assert found.seconds == pytest.approx(found.compute_s + found.exchange_s - local)


@pytest.mark.parametrize("scheme", ["plan", "ring", "all_gather", "ulysses"])
def test_training_bytes_and_work_are_all_there(scheme):
    """On a link without latency the exchange takes the bytes of ``sent_bytes``; work is
    that of all products.
    """
    free = Network((0, 1), {BETWEEN: Line((0, BETA), (0.0, 1.0))}, TWO.work)
    found = predict(
        MetaCall(LADDER, scheme=scheme, passes="fwd+bwd", **CALL), 1024, free
    )
    problem = Problem(LADDER, contiguous(1024, 2), False, 4, 4)
    sent = sent_bytes(
        problem, 0, scheme, batch=1, head_dim=16, dtype=torch.float32, passes="fwd+bwd"
    )
    assert found.exchange_s == pytest.approx((2 * 24 + sent) / BETA)
    assert (
        max(found.compute_s, found.exchange_s)
        <= found.seconds
        <= found.compute_s + found.exchange_s
    )


def test_ranks_of_a_machine_share_its_link():
    four = Network(
        (0, 0, 1, 1), {BETWEEN: LINE, INSIDE: Line((0, BETA), (0.0, 1e-3))}, TWO.work
    )
    size = 10_000_000
    assert four.transfer_s({(0, 2): size}) == pytest.approx(ALPHA + 0.1)
    assert four.transfer_s({(0, 2): size, (1, 3): size}) == pytest.approx(ALPHA + 0.2)
    assert four.transfer_s({(0, 2): size, (3, 1): size}) == pytest.approx(
        ALPHA + 0.1
    ), "each way"
    assert four.transfer_s({(0, 1): size, (2, 3): size}) == pytest.approx(1e-4)


def test_an_estimate_has_the_time_and_what_does_not_fit_is_refused():
    found = estimate(LADDER, seq_len=1024, network=TWO, heads=4, head_dim=16, ranks=2)
    assert found.predicted == predict(MetaCall(LADDER, **CALL), 1024, TWO)
    for given, said in (
        ({"ranks": 3}, "measured with 2 ranks, the call has 3"),
        ({"profile": "h100"}, "h100 is a GPU"),
        ({"dtype": torch.float64}, "measured in float32, not in float64"),
    ):
        with pytest.raises(ValueError, match=said):
            predict(MetaCall(LADDER, **CALL | given), 1024, TWO)


# --------------------------------------------------------------------------------------
# two hosts on this machine


def on_hosts(made, folder, cases):
    """This rank's host, the network, and its results of each case over the link."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    made.enter(rank)
    store = dist.FileStore(f"{folder}/again", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    results = [case.run(*case.shards(rank), dist.group.WORLD) for case in cases]
    return socket.gethostname(), network.measure(0.5, ("float32",)), results


@pytest.fixture(scope="module")
def link():
    try:
        with hosts(Link.of(mbit_per_s=200, round_trip_ms=8)) as made:
            yield made
    except NotAllowed as error:
        pytest.skip(str(error))


def test_attention_between_hosts_is_that_of_simulated_ranks_and_the_link_is_measured(
    link, tmp_path
):
    rng = random.Random(0)
    how = {"lse_cotangent": True, "layout": contiguous(300, 2)}
    cases = [
        Case(
            rng.choice([Dense(), LADDER]),
            300,
            torch.float64,
            True,
            1,
            4,
            2,
            8,
            scheme=scheme,
            **how,
        )
        for scheme in ("plan", "ring", "all_gather", "ulysses")
    ]
    everyone = launch.launch(on_hosts, 2, link, str(tmp_path), cases)
    names, networks, results = zip(*everyone)
    assert names == ("host-0", "host-1")
    for i, case in enumerate(cases):
        want, found = case.run(*drawn(case)), case.joined([each[i] for each in results])
        for name, t in want.items():
            torch.testing.assert_close(found[name], t, rtol=1e-12, atol=1e-12)
    assert (
        networks[0] == networks[1]
        and networks[0].hosts == (0, 1)
        and set(networks[0].lines) == {BETWEEN}
    )
    line = networks[0].lines[BETWEEN]
    assert line.latency_s >= 0.008, "gloo's least exchange goes there and back"
    assert line.per_s <= 1.2 * 200e6 / 8, "no faster than the link"


def test_links_that_cannot_be_are_refused():
    for rate, ms in ((0, 1), (-1, 1), (1, -1), ("1", 1), (1, float("nan"))):
        with pytest.raises(ValueError, match="a positive rate and a latency"):
            Link.of(rate, ms)

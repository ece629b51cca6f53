"""A cache whose rows are shared out to ranks: the answer of one device, and every live
row on one rank.
"""

import random

import pytest
import torch
from document_cases import EXACT, PATTERNS
from matrix import F32, F64, Case, drawn
from random_cases import seeds
from ring_cases import cached, generated, unequal_chunks
from ringlab import Dense, Dilated, Simulated, reference
from ringlab.engine.retention import retention_policy
from ringlab.ring.launch import RankFailed, launch

LADDER = Dilated([256, 512, 1024, 2048], [1, 2, 4, 8])


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_answer_as_simulated_ranks_and_as_the_reference(ranks):
    rng, cases = random.Random(ranks), []
    for _ in seeds(2):
        heads, kv_heads = rng.choice([(4, 4), (4, 2), (6, 1)])
        sizes = [rng.choice([1, 1, 7, 40]) for _ in range(rng.randint(2, 12))]
        about = {
            "heads": heads,
            "kv_heads": kv_heads,
            "d": 8,
            "seed": rng.randrange(1 << 30),
        }
        cases.append(
            (
                Case(
                    rng.choice(PATTERNS),
                    sum(sizes),
                    rng.choice([F64, F32]),
                    batch=2,
                    sinks=len(cases) % 3 == 0,
                    **about,
                ),
                sizes,
            )
        )
    everyone, simulated = launch(cached, ranks, cases), cached(cases, Simulated(ranks))
    for i, (case, _) in enumerate(cases):
        *given, sinks = (*drawn(case)[0], None)[:4]
        longer = (torch.cat([t, t[:, :9]], 1) for t in given)
        how = {"causal": True, "sinks": sinks}
        want, _ = reference.attention(*longer, case.pattern, **how)
        for out, lse, _, sent in (found[i] for found in everyone):
            assert reference.error(out, want[:, : case.n], 1.0) <= EXACT[case.dtype], (
                case
            )
            assert torch.equal(out, simulated[i][0]) and torch.equal(
                lse, simulated[i][1]
            )
            assert (
                sent == (ranks - 1) * (out.numel() + lse.numel()) * case.dtype.itemsize
            )  # to each other
        for head, rows in enumerate(simulated[i][2]):
            assert (
                torch.cat([found[i][2][head] for found in everyone])
                .sort()
                .values.equal(rows)
            )


def test_no_rank_keeps_much_more_than_its_part():
    """Of every branch, whatever its rate: hashing does not follow the residues of the
    pattern.
    """
    for pattern in (Dense(), LADDER):
        most = retention_policy(pattern, 4, 4, 16384, 0, 0, 1).slots
        each = [
            retention_policy(pattern, 4, 4, 16384, 0, rank, 4).slots
            for rank in range(4)
        ]
        assert max(each) <= 1.25 * most / 4, (pattern, most, each)


@pytest.mark.parametrize("pattern", [Dense(), Dilated([8, 32], [1, 4])], ids=str)
def test_ranks_generate_the_tokens_of_one(pattern):
    want = generated(pattern, None)
    for found in launch(generated, 2, pattern):
        assert torch.equal(found, want)


def test_ranks_that_bring_different_chunks_are_told_so():
    with pytest.raises(
        RankFailed,
        match="ranks disagree about what is computed: (positions|lengths) is",
    ):
        launch(unequal_chunks, 2)

"""Ranks under NCCL's contract: every way to share attention gives the answer of one
device, and what NCCL would refuse, hang in or answer by rubbish is found.
"""

import pytest
import torch
from content_cases import step, tensors
from document_cases import wanted
from matrix import BLOCK_SPARSE, LADDER, Case, Dense, drawn, errors, judged
from nccl_cases import (
    MISTAKES,
    REASONS,
    answers,
    attend,
    attention_cases,
    by_content,
    disagree,
    generate,
    mistakes,
)
from ringlab import Simulated, reference
from ringlab.ring import contiguous, counting, zigzag
from ringlab.ring.launch import launch

EXACT = 1e-12
BORDERS = {"cu_seqlens": torch.tensor([0, 20, 41, 90, 96])}
CONTENT = [("means", True), ("z", False), ("scorer", True)]
CACHES = [
    (Case(pattern, 40, causal=True, batch=2, d=8), [17, 1, 22])
    for pattern in (Dense(), LADDER, BLOCK_SPARSE[0])
]


def document_cases(ranks: int) -> list[Case]:
    how = {"causal": True, "d": 8, "backend": "eager", "documents": BORDERS}
    return [
        Case(pattern, 96, layout=layout(96, ranks), scheme=scheme, **how)
        for scheme, pattern, layout in (
            ("plan", BLOCK_SPARSE[0], contiguous),
            ("ring", Dense(), zigzag),
            ("all_gather", LADDER, contiguous),
            ("ulysses", LADDER, zigzag),
        )
    ]


def shared_wrongly(case: Case, everyone, machines: int) -> float:
    """The error of a case, in which a wrong number of bytes is infinite."""
    shards, sent = zip(*everyone)
    inputs, dout, dlse = drawn(case)
    if case.documents:
        want = wanted(case, inputs, dout, dlse)
    else:
        want = judged(case)[3]
    with counting() as traffic:
        case.run(inputs, dout, dlse, Simulated(case.mesh or len(sent), machines))
    if [traffic.from_rank(rank) for rank in range(len(sent))] != [*sent]:
        return torch.inf
    return max(errors(case.joined(shards), want, *inputs[:2], dout).values())


def chosen_wrongly(shape, kind, causal, everyone) -> float:
    given = tensors(shape, kind)
    want, floor = (
        step(given, kind, causal, None),
        reference.gradient_floor(given[0], given[1], given[-2]),
    )
    dims = [1, 1, 1, 1, None, None] if kind == "scorer" else [1, 2, 1, 1, 1, 2]
    shards = [
        sum(parts) if dim is None else torch.cat(parts, dim)
        for parts, dim in zip(zip(*everyone), dims)
    ]
    results = 1 if kind == "scorer" else 2
    return max(
        reference.error(a, b, 1.0 if i < results else floor)
        for i, (a, b) in enumerate(zip(shards, want))
    )


def generated_wrongly(case: Case, everyone) -> float:
    want = reference.attention(*drawn(case)[0], case.pattern, causal=True)
    return max(
        reference.error(a, b, 1.0) for each in everyone for a, b in zip(each, want)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["double", "nccl"])
def test_every_way_to_share_attention_gives_the_answer_of_one_device(kind, ranks):
    if kind == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    cases = attention_cases(ranks) + document_cases(ranks)
    shape, machines = (2, 4, 2, 3 * ranks), 1 + (ranks == 4)
    jobs = [
        *((attend, case) for case in cases),
        *((by_content, shape, *content) for content in CONTENT),
        *((generate, *cache) for cache in CACHES),
        (disagree,),
        (attend, cases[0]),
    ]
    everyone = list(zip(*launch(answers, ranks, kind, machines, jobs, timeout_s=300.0)))
    apart = {}
    for (job, *about), results in zip(jobs, everyone, strict=True):
        if job is attend:
            apart[str(about)] = shared_wrongly(*about, results, machines)
        elif job is by_content:
            apart[str(about)] = chosen_wrongly(*about, results)
        elif job is generate:
            apart[str(about)] = generated_wrongly(about[0], results)
        else:
            assert all("causal is" in message for message in results), results
    wrong = {what: error for what, error in apart.items() if not error <= EXACT}
    assert len(apart) == len(cases) + 6 and not wrong, wrong


@pytest.fixture(scope="module")
def told():
    """What each mistake tells three ranks."""
    names = list(MISTAKES)
    return dict(zip(names, zip(*launch(mistakes, 3, names, timeout_s=120.0))))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_nothing_else(name, told):
    found = [message for message in told[name] if message]
    assert bool(found) == bool(REASONS[name])
    assert all(REASONS[name] in message for message in found), found

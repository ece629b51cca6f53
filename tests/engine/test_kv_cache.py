"""Generation with a cache: each position is that row of full attention, and no row is
kept that nothing sees.
"""

import random

import generated
import pytest
import torch
from document_cases import EXACT, PATTERNS
from matrix import BLOCK_SPARSE, DILATED, F32, F64, HALF, cache_for
from random_cases import seeds
from refusals import refused
from ringlab import (
    Dense,
    Dilated,
    KVCache,
    Simulated,
    attention,
    blocks,
    cache_bytes,
    reference,
    tracking,
)
from ringlab.engine import live_rows, retention

LADDER = Dilated([2048 << i for i in range(10)], [1 << i for i in range(10)])


def tensors(b, n, heads, kv_heads, d, dtype=F64):
    return [torch.randn(b, n, h, d, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


def full(q, k, v, pattern) -> torch.Tensor:
    """The output of full attention, by the oracle."""
    return reference.attention(q, k, v, pattern, causal=True)[0]


def step(cache, *rows, **how):
    """A call with the cache, of its own pattern."""
    return attention(*rows, cache.pattern, causal=True, cache=cache, **how)


def stepped(cache, q, k, v, sizes) -> torch.Tensor:
    """The output of calls with these many rows each."""
    parts = zip(*(t.split(sizes, 1) for t in (q, k, v)))
    return torch.cat([step(cache, *part) for part in parts], 1)


def pieces(rng: random.Random, n: int) -> list[int]:
    """Sizes of chunks that add up to n: single positions, short and long ones."""
    sizes = []
    while (left := n - sum(sizes)) > 0:
        sizes.append(
            min(left, rng.choice([1, 1, 3, rng.randint(1, n), rng.randint(1, n)]))
        )
    return sizes


def shown(pattern, n: int, heads: int, kv_heads: int) -> torch.Tensor:
    """Which key some query of a K/V head sees, by the pattern's own definition:
    (kv_heads, n, n).
    """
    at, how = torch.arange(n), {"n": n, "heads": heads, "kv_heads": kv_heads}
    seen = torch.stack(
        [pattern.multiplicity(at, at, head=head, **how) > 0 for head in range(heads)]
    )
    return seen.unflatten(0, (kv_heads, -1)).any(1)


@pytest.mark.parametrize("seed", range(4))
def test_a_policy_says_what_the_pattern_shows(seed, monkeypatch):
    """Masks at every position, and the last query of each row, by the definition."""
    rng = random.Random(seed)
    monkeypatch.setattr(retention, "PIECE", rng.choice([5, 4096]))
    for pattern in rng.sample([*PATTERNS, BLOCK_SPARSE[0]], 8):
        n, (heads, kv_heads) = rng.randint(1, 90), rng.choice([(1, 1), (4, 2), (4, 4)])
        policy = retention.retention_policy(pattern, heads, kv_heads, n, 0)
        at, how = torch.arange(n), {"n": n, "heads": heads, "kv_heads": kv_heads}
        m = [pattern.multiplicity(at, at, head=h, **how) for h in range(heads)]
        m = torch.stack(m).tril()  # (heads, queries, keys)
        rows = at.expand(policy.tables, -1)  # (tables, n)
        last = torch.where(m > 0, at[:, None], retention.NEVER).amax(1)
        last = last.unflatten(0, (policy.tables, -1)).amax(1)
        assert torch.equal(policy.last_query(rows), last), pattern
        for t in rng.sample(range(n), min(n, 6)):
            until = policy.next_boundary(torch.tensor([t]))
            for query in {t, rng.randrange(t, int(until))}:
                masks = policy.row_masks(rows[None, :, : query + 1], until)
                asked = policy.query_masks(
                    masks[..., query:], torch.tensor([[query]]), until
                )
                counts = live_rows.log_counts(masks & asked, policy.bits, F64).exp()
                counts = counts.flatten(1, 2)[0].round()  # (tables * viewers, keys)
                want = m[:, query, : query + 1].double()
                assert torch.equal(counts.expand_as(want), want), (pattern, query)


def test_a_state_is_taken_and_restored_under_a_default_device():
    pattern = blocks.sliding_window(tokens=7)
    cache = KVCache(pattern, **CACHE)
    rows = torch.randn(1, 12, 2, 8)
    with torch.device("meta"):
        for t in range(12):
            now = rows[:, t : t + 1]
            step(cache, now, now, now)
        cache.load_state_dict(cache.state_dict())
    assert [x.tolist() for x in cache.live_rows()] == [[*range(6, 12)]] * 2


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("window", [40, 250])
def test_long_pieces_see_a_window_of_tokens(window, dtype):
    """Some of their queries see the rows that are kept, some only one another."""
    pattern, n, sizes = blocks.sliding_window(tokens=window), 400, [150, 130, 1, 119]
    q, k, v = tensors(1, n, 2, 1, 8, dtype)
    cache = cache_for(pattern, q, k, 500)
    got = stepped(cache, q, k, v, sizes)
    assert reference.error(got, full(q, k, v, pattern), 1.0) <= EXACT[dtype]
    assert cache.live_rows()[0].tolist() == [*range(n - window + 1, n)]


@pytest.mark.parametrize("seed", range(6))
def test_any_pieces_give_the_rows_of_full_attention(seed, monkeypatch):
    """Random patterns, heads, dtypes, lengths and pieces; live rows by brute force at
    every stop.
    """
    rng = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(
            live_rows, "WASTE", 0
        )  # what sees alike is read apart, as it is from a long cache
    for _ in seeds(5):
        pattern, n = (
            rng.choice([*PATTERNS, BLOCK_SPARSE[0]]),
            rng.randint(1, rng.choice([30, 80])),
        )
        (heads, kv_heads), b = (
            rng.choice([(1, 1), (4, 2), (6, 1), (4, 4), (8, 8)]),
            rng.randint(1, 3),
        )
        dtype, d, max_crop = (
            rng.choice([F64, F32]),
            rng.choice([8, 16]),
            rng.choice([0, 0, 3]),
        )
        given = {
            "heads": heads,
            "kv_heads": kv_heads,
            "max_seq_len": n,
            "max_crop": max_crop,
        }
        q, k, v = tensors(b, n, heads, kv_heads, d, dtype)
        ranks = rng.choice([1, 1, 2, 3])  # each of which keeps a part of the rows
        cache = KVCache(
            pattern, batch=b, head_dim=d, dtype=dtype, group=Simulated(ranks), **given
        )
        sinks = 2 * torch.randn(heads) if n % 3 == 0 else None
        want, want_lse = reference.attention(q, k, v, pattern, causal=True, sinks=sinks)
        outs, lses, t, seen = [], [], 0, shown(pattern, n, heads, kv_heads)
        for size in pieces(rng, n):
            some = (x[:, t : t + size] for x in (q, k, v))
            out, lse = step(cache, *some, return_lse=True, sinks=sinks)
            outs, lses, t = [*outs, out], [*lses, lse], t + size
            live = [rows.tolist() for rows in cache.live_rows(b - 1)]
            later = [rows[t:, :t].any(0).nonzero().flatten().tolist() for rows in seen]
            assert live == later if max_crop == 0 else max(map(len, live)) <= t
        case = pattern, n, heads, kv_heads, dtype, max_crop, ranks
        assert cache.nbytes <= ranks * cache_bytes(
            pattern, batch=b, head_dim=d, dtype=dtype, ranks=ranks, **given
        )
        assert reference.error(torch.cat(outs, 1), want, 1.0) <= EXACT[dtype], case
        assert reference.error(torch.cat(lses, 2), want_lse, 1.0) <= EXACT[dtype], case


@pytest.mark.parametrize("seed", range(4))
def test_sequences_of_a_batch_are_each_what_they_are_alone(seed, monkeypatch):
    """Random chunks of other lengths, reordered, cropped to other lengths, saved and
    copied; padding is NaN.
    """
    if seed % 2:
        monkeypatch.setattr(live_rows, "WASTE", 0)
    for i in seeds(2):
        for dtypes, most in (((F64,), EXACT[F64]), (HALF, 1e-2)):
            found = generated.drawn(1000 * seed + i, dtypes=dtypes, spoil=False)
            assert found["zeros"] and found["bound"] <= 2 * most, found
            assert found["out"] <= 1 and found["lse"] <= most, found


def test_sequences_of_one_length_may_keep_other_rows_after_a_crop():
    q, k, v = tensors(2, 40, 2, 2, 8)
    pattern = Dilated([4, 16], [1, 2])
    cache, restored = (cache_for(pattern, q, k, 40, max_crop=3) for _ in range(2))
    for new, lengths in ((slice(0, 17), [17, 17]), (slice(17, 20), [3, 0])):
        step(cache, *(x[:, new] for x in (q, k, v)), lengths=lengths)
    cache.crop(17)
    assert len(cache.live_rows(0)[0]) < len(cache.live_rows(1)[0])
    out = step(cache, *(x[:, 17:19] for x in (q, k, v)))
    assert reference.error(out, full(q, k, v, pattern)[:, 17:19], 1.0) <= 1e-12
    cache.crop([17, 17])
    restored.load_state_dict(cache.state_dict())
    for one in (cache, restored):
        with pytest.raises(
            ValueError, match="sequence 0 cannot be cropped to 15: .*max_crop"
        ):  # it had 20 positions
            one.crop(15)


def test_a_million_positions_keep_few_rows():
    """[2048 * 2^i] / [2^i], i = 0..9: at most 11,263 rows a head; the bytes that were
    said are the bytes.
    """
    n, row = 1 << 20, 2 * 64 * 4
    cache = KVCache(LADDER, batch=1, heads=8, head_dim=64, max_seq_len=n)
    assert (
        cache.nbytes
        == cache_bytes(LADDER, heads=8, max_seq_len=n)
        <= 1.05 * 8 * 11_263 * row
    )
    q, k, v = tensors(1, 17_000, 8, 8, 64, F32)
    step(cache, q, k, v)
    for head, rows in enumerate(cache.live_rows()):
        branches = zip(LADDER.segment_lengths, LADDER.dilation_rates)
        wanted = {
            x for w, r in branches for x in range(17_000 // w * w + head % r, 17_000, r)
        }
        assert rows.tolist() == sorted(wanted)


def test_a_key_that_is_hidden_changes_nothing_whatever_it_holds():
    q, k, v = tensors(1, 40, 2, 2, 8)
    pattern = Dilated([4, 16], [1, 2])
    clean, stained = (cache_for(pattern, q, k, 40) for _ in range(2))
    spoiled = k.clone()
    spoiled[:, 8] = torch.nan  # seen by head 0 from 9 to 15 at even positions
    for t in range(40):
        now = slice(t, t + 1)
        a, b = (
            step(cache, q[:, now], keys[:, now], v[:, now])
            for cache, keys in ((clean, k), (stained, spoiled))
        )
        sees = [
            t == 8
            or bool(
                pattern.multiplicity(
                    torch.tensor([t]), torch.tensor([8]), head=h, heads=2
                )
            )
            for h in (0, 1)
        ]
        for head, stained_here in enumerate(sees):
            if not (stained_here and t >= 8):
                assert torch.equal(a[:, :, head], b[:, :, head]), t


CACHE = {"batch": 1, "heads": 2, "head_dim": 8, "max_seq_len": 16}


def call(cache_options=None, pattern=DILATED[0], n=4, b=1, heads=2, dtype=F32, **how):
    cache = KVCache(DILATED[0], **CACHE | (cache_options or {}))
    q = torch.zeros(
        b, n, heads, 8, dtype=dtype, requires_grad=how.pop("requires_grad", False)
    )
    try:
        attention(q, q, q, pattern, **{"causal": True, "cache": cache} | how)
    finally:
        assert cache.lengths == [0]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"pattern": Dense()}, ValueError, "the cache is of another pattern"),
        ({"causal": False}, ValueError, "a cache needs causal=True"),
        (
            {"n": 17},
            ValueError,
            "the cache is full: 0 of 16 positions are taken in sequence 0, and 17 are new",
        ),
        ({"b": 2}, ValueError, "the cache is for a batch of 1"),
        ({"heads": 4}, ValueError, "2 heads, 2 K/V heads, head_dim 8, got"),
        ({"dtype": F64}, ValueError, "the cache is torch.float32"),
        ({"requires_grad": True}, ValueError, "torch.no_grad"),
        ({"lengths": [5]}, ValueError, "lengths must be 1 numbers of 0 to 4"),
        ({"cu_seqlens": [0, 4]}, ValueError, "lengths instead of cu_seqlens"),
        ({"group": Simulated(2)}, ValueError, "give no group"),
        ({"cache": 3}, TypeError, "must be a ringlab.KVCache"),
        (
            {"cache_options": {"max_seq_len": 0}},
            ValueError,
            "max_seq_len must be a positive integer",
        ),
        ({"cache_options": {"kv_heads": 3}}, ValueError, "multiple of K/V heads"),
        ({"cache_options": {"device": "cuda:x"}}, ValueError, "device"),
        ({"cache_options": {"device": "meta"}}, ValueError, "a cache holds values"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_and_changes_nothing(
    change, error, words
):
    with refused(error, match=words):
        call(**change)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda c: c.crop(5), "has 4 positions and cannot be cropped to 5"),
        (lambda c: c.crop([1, 2]), "crop takes one length, or 1"),
        (lambda c: c.reorder([1]), "reorder takes the numbers of 1 sequences"),
        (lambda c: c.live_rows(1), "there is no sequence 1 among 1"),
        (lambda c: c.live_rows(1.5), "there is no sequence 1.5 among 1"),
        (
            lambda c: KVCache(Dense(), **CACHE).load_state_dict(c.state_dict()),
            "the state is of another cache",
        ),
    ],
)
def test_what_cannot_be_done_to_a_cache_is_refused(do, words):
    cache = KVCache(DILATED[0], **CACHE)
    step(cache, *[torch.zeros(1, 4, 2, 8)] * 3)
    with pytest.raises(ValueError, match=words):
        do(cache)
    assert cache.lengths == [4]


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: {},
        lambda part: None,
        lambda part: part | {"more": part["k"]},
        lambda part: part | {"v": 5},
        lambda part: part | {"k": part["k"][:, :, :2]},
        lambda part: part | {"v": part["v"].double()},
        lambda part: part | {"counts": part["counts"] + 9},
        lambda part: part | {"positions": part["k"]},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    cache, other = (KVCache(DILATED[0], **CACHE) for _ in range(2))
    for one, n in ((cache, 4), (other, 7)):
        step(one, *[torch.ones(1, n, 2, 8)] * 3)
    state, kept = other.state_dict(), cache.state_dict()["parts"][0]
    for parts in ([damage(state["parts"][0])], [], {}, state["parts"] * 2):
        with pytest.raises(ValueError, match="the state is damaged"):
            cache.load_state_dict(state | {"parts": parts})
    assert all(
        torch.equal(kept[name], t) for name, t in cache.state_dict()["parts"][0].items()
    )
    cache.load_state_dict(state)
    assert cache.lengths == [7]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda k: (k, k[:1]),
        lambda k: (k, k[:, :, :1]),
        lambda k: (k, k[:, :3]),
        lambda k: (k, k[..., :4]),
        lambda k: (k, k.double()),
        lambda k: (None, None),
        lambda k: (k[0], k[0]),
        lambda k: (k[:, :0], k[:, :0]),
    ],
)
def test_append_takes_rows_as_attention_does_and_refuses_others_unchanged(wrong):
    pattern = DILATED[0]
    q, k, v = tensors(2, 30, 4, 2, 8, F32)
    cache, other = (cache_for(pattern, q, k, 40) for _ in range(2))
    with pytest.raises(ValueError, match="append takes|must agree"):
        cache.append(*wrong(k))
    cache.append(k[:, :20], v[:, :20])
    first, rest = ([x[:, s] for x in (q, k, v)] for s in (slice(20), slice(20, 30)))
    step(other, *first)
    a, b = (step(c, *rest) for c in (cache, other))
    assert torch.equal(a, b)


def test_a_cache_made_in_inference_mode_serves_outside_and_narrow_values_come_back_narrow():
    pattern = Dilated([4, 8], [1, 2])
    q, k, v = tensors(1, 12, 2, 2, 8)
    v = v[..., :4]
    with torch.inference_mode():
        cache = cache_for(pattern, q, k, 40)
        first = step(cache, *(x[:, :5] for x in (q, k, v)))
    with torch.no_grad():
        rest = stepped(cache, *(x[:, 5:] for x in (q, k, v)), [1, 6])
    got = torch.cat([first, rest], 1)
    assert reference.error(got, full(q, k, v, pattern), 1.0) <= 1e-12


@pytest.mark.parametrize(
    "pattern", [blocks.sliding_window(1, block_size=16), DILATED[0]], ids=str
)
def test_sequences_may_take_steps_in_any_order(pattern):
    """Some alone, some together, and as copies of each other, over more positions than
    are prepared together.
    """
    rng, n = random.Random(1), 150
    q, k, v = (x.expand(2, -1, -1, -1) for x in tensors(1, n, 4, 2, 16, F64))
    cache = cache_for(pattern, q, k, n)
    want, errors = full(q[:1], k[:1], v[:1], pattern), []
    while min(at := cache.lengths) < n:
        steps = [int(t < n and (t == min(at) or rng.random() < 0.8)) for t in at]
        some = [
            torch.stack([x[i, min(t, n - 1) :][:1] for i, t in enumerate(at)])
            for x in (q, k, v)
        ]
        out = step(cache, *some, lengths=steps)
        errors += [
            float((out[i, 0] - want[0, t]).norm()) for i, t in enumerate(at) if steps[i]
        ]
        if rng.random() < 0.05:
            cache.reorder([1, 0])
    assert max(errors) <= 1e-12


def test_a_step_of_a_large_batch_takes_little_memory():
    """What is prepared grows as the sequences and the steps do, not as their square."""
    pattern = blocks.sliding_window(1, block_size=16)
    cache = KVCache(pattern, batch=200, heads=1, head_dim=8, max_seq_len=400)
    rows = torch.randn(200, 160, 1, 8)
    cache.append(rows, rows)
    for _ in range(20):
        with tracking.LiveStorageTracker() as live:
            step(cache, *[rows[:, :1]] * 3)
        assert live.peak_bytes < 4 << 20


@pytest.mark.parametrize(
    "pattern", [blocks.sliding_window(1, block_size=16), DILATED[0]], ids=str
)
def test_a_step_that_fails_can_be_done_again(pattern, monkeypatch):
    """In any of the steps that are prepared together."""
    q, k, v = tensors(2, 60, 4, 2, 16, F64)
    cache = cache_for(pattern, q, k, 60)
    outs = []
    for t in range(60):
        some = [x[:, t : t + 1] for x in (q, k, v)]
        with (
            monkeypatch.context() as patch,
            pytest.raises(MemoryError),
            torch.inference_mode(),
        ):
            patch.setattr(
                live_rows,
                "one_query",
                lambda *args: (_ for _ in ()).throw(MemoryError()),
            )
            step(cache, *some)
        outs.append(step(cache, *some))
    found = reference.error(torch.cat(outs, 1), full(q, k, v, pattern), 1.0)
    assert found <= EXACT[F64]


@pytest.mark.parametrize(
    ("lengths", "rates", "at"),
    [([4, 16], [1, 1], 2), ([4, 16], [1, 1], 3), ([8, 64], [1, 2], 7)],
)
def test_a_value_that_was_dropped_leaves_nothing_behind(lengths, rates, at):
    """Heads with fewer rows are read beyond them, with those that have more: what lay
    there has weight 0, NaN too.
    """
    pattern, end = Dilated(lengths, rates, mixing="head_groups"), lengths[0]
    q, k, v = tensors(1, 32, 2, 2, 8)
    want = full(q, k, v, pattern)
    v[:, at, 0] = torch.nan  # the first head sees it to the end of its segment
    cache = cache_for(pattern, q, k, 32)
    out = stepped(cache, q, k, v, 1)
    assert out[:, at:end, 0].isnan().all()
    out[:, at:end, 0] = want[:, at:end, 0]
    assert reference.error(out, want, 1.0) <= 1e-12


def test_a_value_that_was_cropped_leaves_nothing_behind():
    pattern = Dilated([4, 16], [1, 2], mixing="head_groups")
    q, k, v = tensors(1, 32, 2, 2, 8)
    cache = cache_for(pattern, q, k, 32, max_crop=3)
    draft, out = torch.full_like(v, torch.nan), []
    for t in range(32):
        step(cache, *(x[:, t : t + 3] for x in (q, k, draft)))
        cache.crop(t)
        out.append(step(cache, *(x[:, t : t + 1] for x in (q, k, v))))
    found = reference.error(torch.cat(out, 1), full(q, k, v, pattern), 1.0)
    assert found <= 1e-12

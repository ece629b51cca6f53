"""Small models that train: tasks that say what they claim, losses of torch's own
attention, kills, ranks.
"""

import math
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import tasks
import torch
import trained
import trainings
from model import patterns
from ringlab import Adaptive, Simulated, adaptive_attention, attention, selection
from ringlab import nn as layers
from ringlab.measure.store import Store
from tasks import HIDDEN, TASKS
from torch.nn import functional as F
from train import SIZES, Run, Sizes, build, rate_at, step, train

# --------------------------------------------------------------------------------------
# tasks


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_the_same_tokens_and_held_out_ones_are_others(name):
    task = TASKS[name]
    one, again, other, held = (
        task.batch(2, 128, *a) for a in (("1",), ("1",), ("2",), ("1", True))
    )
    for a, b in zip(vars(one).values(), vars(again).values()):
        assert torch.equal(a, b) and a.shape == (2, 128) and a.dtype == torch.int64
    assert not torch.equal(one.tokens, other.tokens) and not torch.equal(
        one.tokens, held.tokens
    )
    assert 0 <= int(one.tokens.min()) and int(one.tokens.max()) < task.vocabulary
    known = one.targets != HIDDEN
    assert (
        torch.equal(known, one.distances > 0)
        and int(one.targets[known].max()) < task.vocabulary
    )


@pytest.mark.parametrize("name, length", [("recall", 1), ("copy", tasks.LENGTH)])
@pytest.mark.parametrize("seq", [32, 512])
def test_what_is_asked_for_was_written_once_before_at_the_stated_distance(
    name, length, seq
):
    batch, ends = (
        TASKS[name].batch(4, seq, "0"),
        tasks.distances(seq, 8 if length == 1 else 16),
    )
    checked = set()
    for tokens, targets, far in zip(*(t.tolist() for t in vars(batch).values())):
        for at in (i for i, target in enumerate(targets) if target != HIDDEN):
            before = [i for i in range(at) if tokens[i] == tokens[at]]
            assert len(before) == 1 and tokens[before[0] + 1] == targets[at]
            end = far[at]
            assert (end // 2 if end > ends[0] else 1) < at - before[
                0
            ] <= end and end in ends
            checked.add(end)
    assert checked == set(ends) if seq == 512 else checked


def value_of(tokens: list[int]) -> list[tuple[int, int]]:
    """(position, value) of every argument and end of the lists in a sequence, by a
    reader of its own.
    """
    found, stack = [], []
    functions = {10: max, 11: min, 12: lambda x: sorted(x)[(len(x) - 1) // 2]}
    for at, token in enumerate(tokens):
        if token in functions:
            stack.append((functions[token], []))
        elif token == tasks.CLOSE:
            function, values = stack.pop()
            found.append((at, function(values)))
            assert tokens[at + 1] == function(
                values
            )  # the value stands behind its list
        elif token < 10 and stack:
            stack[-1][1].append(token)
            found.append((at, stack[-1][0](stack[-1][1])))
    return found


@pytest.mark.parametrize("seq", [32, 512])
def test_lists_have_the_values_that_they_are_said_to_have(seq):
    batch = TASKS["lists"].batch(8, seq, "3")
    nested = 0
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
        found = value_of(tokens)
        assert [(at, t) for at, t in enumerate(targets) if t != HIDDEN] == found
        nested += (
            any(a in (10, 11, 12) and b < 10 for a, b in zip(tokens[1:], tokens))
            and seq > 32
        )
    assert nested or seq == 32
    assert set(batch.distances.unique().tolist()) <= {0, *tasks.distances(seq, 16), seq}


def test_files_of_the_text_are_held_out_whole_and_predict_the_next_byte():
    (train_bytes, digest), (held, other) = tasks.text(False), tasks.text(True)
    assert digest != other and len(train_bytes) > 4 * len(held) > 1e6
    batch = TASKS["text"].batch(2, 256, "0")
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.distances[0, [0, 63, 64, 255]].tolist() == [64, 64, 256, 256]
    line = bytes(held[5000:5400].tolist())
    assert line not in bytes(train_bytes.tolist())


# --------------------------------------------------------------------------------------
# patterns and models


def test_sparse_patterns_show_about_as_many_keys_and_all_of_a_sequence_of_two_blocks():
    for block, n in ((16, 512), (32, 4096), (32, 16384)):
        queries = torch.arange(n)
        for name in (
            "Window",
            "LongNet",
            "Local and global",
            "BigBird",
            "Hierarchical",
        ):
            seen, some = 0, queries[torch.arange(n // 2, n, n // 256 + 1)]
            for head in range(4):
                m = patterns(block, n)[name][0].multiplicity(
                    some, queries, n=n, head=head, heads=4
                )
                seen += (
                    float((m.bool() & (queries <= some[:, None])).sum()) / len(some) / 4
                )
            assert 2.3 * block < seen < 3.7 * block, (name, n, seen)
        for name, each in patterns(block, 2 * block).items():
            for p in each if name not in ("Adaptive", "MoBA", "NSA", "DSA") else ():
                m = p.multiplicity(
                    torch.arange(2 * block),
                    torch.arange(2 * block),
                    n=2 * block,
                    head=0,
                    heads=4,
                )
                assert (m.bool() | ~torch.ones_like(m).tril().bool()).all(), name


def test_all_patterns_have_equal_parameters_and_equal_initial_weights():
    """But for what NSA and DSA have beside them."""
    names = patterns(16, 512)
    states = {
        name: build(trained.small("recall", name))[0].state_dict() for name in names
    }
    first = states["Dense"]
    assert len(names) == 13
    for name, other in states.items():
        own = {key.split(".")[2] for key in other.keys() - first.keys()}
        indexer = {"index_q", "index_k", "index_weights"}
        assert own == {"NSA": {"gates"}, "DSA": indexer}.get(name, set())
        assert all(torch.equal(first[k], other[k]) for k in first)


def sdpa(q, k, v, pattern, *, causal, **_):
    """torch's attention in the place of ours."""
    return F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal
    ).transpose(1, 2)


def test_dense_trains_as_with_attention_of_torch(monkeypatch):
    run = trained.small("text", "Dense", (64, 16, 40))
    ours, model = train(run)["losses"], build(run)[0].double()
    batch = TASKS["text"].batch(2, 256, "gradients")

    def gradients() -> list:
        model.zero_grad()
        layers.mean_loss(model(batch.tokens), batch.targets).backward()
        return [p.grad.clone() for p in model.parameters()]

    mine = gradients()
    monkeypatch.setattr(layers, "attention", sdpa)
    for got, wanted in zip(mine, gradients()):
        assert (got - wanted).norm() <= 1e-12 * max(wanted.norm(), 1e-3)
    theirs = train(run)["losses"]
    assert len(ours) == 40 and ours[-1] < 0.8 * ours[0]
    assert max(abs(a / b - 1) for a, b in zip(ours, theirs)) < 0.01


def block_on_rows(name: str) -> tuple:
    """A block in float64, its input x, and y, q and k of it (b, n, h, d)."""
    run = trained.small("recall", name)
    model, x = build(run)[0].double(), torch.randn(2, 128, 16, dtype=torch.float64)
    run.set_length(model, 128)
    block = model.blocks[0]
    y, layer = block.attention_norm(x), block.attention
    q, k = (f(y).unflatten(2, (4, -1)) for f in (layer.q_proj, layer.k_proj))
    turned = (layers.rotary(t, torch.arange(128), 10000.0) for t in (q, k))
    return block, x, y, *turned


def shares_of(q, k, seen):
    """Attention (b, h, n, keys) to what is seen; 0 where nothing is."""
    scores = q.transpose(1, 2) @ k.transpose(1, 2).mT * q.shape[3] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(3).nan_to_num()


def seen_in(choice):
    """What a choice shows to each query (b, h, n, keys)."""
    at = torch.arange(128)
    heads = [choice.multiplicity(at, at, head=i, heads=4) for i in range(4)]
    return torch.stack(heads, 1).bool() & (at <= at[:, None])


def indexed(block, y):
    """Scores of DSA's indexer (b, n, keys), -inf for later keys."""
    at = torch.arange(128)
    index_q, index_k = (
        f(y).unflatten(2, (-1, 4)) for f in (block.index_q, block.index_k)
    )
    index_q, index_k = (layers.rotary(t, at, 10000.0) for t in (index_q, index_k))
    each = torch.einsum("bnjd,bmd->bnjm", index_q, index_k[:, :, 0]).relu()
    scores = torch.einsum("bnjm,bnj->bnm", each, block.index_weights(y)) / 2
    return scores.masked_fill(at > at[:, None], -torch.inf)


@pytest.mark.parametrize("name", ["MoBA", "NSA", "DSA"])
def test_a_block_that_chooses_attends_to_what_it_chose(name):
    block, x, y, q, k = block_on_rows(name)
    layer, at = block.attention, torch.arange(128)
    v = layer.v_proj(y).unflatten(2, (4, -1))
    causal = at <= at[:, None]
    if name == "NSA":
        p = layer.pattern
        choice = selection.nsa_blocks(q, k, block_size=p.block_size, top_k=p.top_k)
        pooled = [t.unflatten(1, (-1, p.block_size)).mean(2) for t in (k, v)]
        ended = (
            torch.arange(1, 128 // p.block_size + 1) * p.block_size - 1 <= at[:, None]
        )
        near = causal & (at > at[:, None] - p.window)
        seen = seen_in(choice)
        out = shares_of(q, pooled[0], ended) @ pooled[1].transpose(1, 2)
        out = out + shares_of(q, k, seen) @ v.transpose(1, 2)
        out = (
            out + shares_of(q, k, near) @ v.transpose(1, 2)
        ) / 2  # gates begin at 0.5
        seen = seen | near
    else:
        if name == "MoBA":
            seen = seen_in(layer.pattern(q, k))
        else:
            best = indexed(block, y).topk(layer.pattern.top_k).indices
            seen = torch.zeros(2, 128, 128, dtype=torch.bool).scatter_(2, best, True)
            seen = (seen & causal).unsqueeze(1)
        out = shares_of(q, k, seen) @ v.transpose(1, 2)
    assert 2.3 * 16 < seen[:, :, 64:].double().sum(3).mean() < 2.7 * 16
    attended = x + layer.out_proj(out.transpose(1, 2).flatten(2))
    z = block.mlp_norm(attended)
    wanted = attended + block.down(F.silu(block.gate(z)) * block.up(z))
    assert (block(x) - wanted).abs().max() < 1e-12


def test_an_indexer_learns_attention_over_the_chosen_keys_and_nothing_else_learns_by_it():
    block, x, y, q, k = block_on_rows("DSA")
    block(x)
    scores = indexed(block, y)
    best = scores.topk(40).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True)
    chosen &= scores > -torch.inf
    target = shares_of(q, k, chosen.unsqueeze(1)).mean(1)
    found = scores.masked_fill(~chosen, -torch.inf).log_softmax(2)
    apart = (target * (target.log() - found))[target > 0].sum() / 256
    assert block.index_loss.item() == pytest.approx(apart.item(), abs=1e-12)
    block.index_loss.backward()
    learned = {name for name, p in block.named_parameters() if p.grad is not None}
    indexer = {f"index_{x}.weight" for x in ("q", "k", "weights")}
    assert learned == indexer
    block.zero_grad()
    block(x).square().sum().backward()
    learned = {name for name, p in block.named_parameters() if p.grad is not None}
    assert not learned & indexer and "attention.q_proj.weight" in learned


def test_an_adaptive_layer_chooses_by_content_and_refuses_what_it_cannot_run():
    pattern = patterns(16, 512)["Adaptive"][0]
    with pytest.raises(ValueError, match="takes no scheme"):
        layers.MultiheadAttention(16, 2, pattern, layout="zigzag", group=Simulated(2))
    layer = layers.MultiheadAttention(16, 2, pattern, causal=True)
    with pytest.raises(NotImplementedError, match="no cache, cu_seqlens or lengths"):
        layer(x := torch.randn(1, 128, 16), cu_seqlens=[0, 64, 128])
    q, k, v = layer._projected(x)
    wanted = adaptive_attention(q, k, v, pattern, causal=True).flatten(2)
    assert torch.equal(layer(x), layer.out_proj(wanted))


def test_a_pattern_may_be_a_function_of_q_and_k_on_one_device_and_one_sequence():
    choose, x = partial(selection.moba, block_size=16, top_k=2), torch.randn(2, 128, 16)
    with pytest.raises(ValueError, match="function takes no group"):
        layers.MultiheadAttention(16, 2, choose, group=Simulated(2))
    with pytest.raises(TypeError, match="pattern must be"):
        layers.MultiheadAttention(16, 2, Adaptive)
    layer = layers.MultiheadAttention(16, 2, choose, num_kv_heads=1, causal=True)
    for given in ({"cu_seqlens": [0, 256]}, {"lengths": [128, 7]}):
        with pytest.raises(NotImplementedError, match="function take no cache"):
            layer(x, **given)
    with pytest.raises(TypeError, match="pattern must be"):
        layer.make_cache(2, 128)
    q, k, v = layer._projected(x)
    wanted = attention(q, k, v, choose(q, k), causal=True).flatten(2)
    assert torch.equal(layer(x), layer.out_proj(wanted))
    layer.use_gradient_checkpointing = True
    assert torch.equal(layer(x), layer.out_proj(wanted))


# --------------------------------------------------------------------------------------
# training


def test_a_model_learns_to_recall_and_a_window_does_not_see_beyond_its_layers():
    phases = (32, 32, 120), (128, 8, 20), (256, 4, 20)
    sizes = Sizes(48, 4, 2, 1e-2, 1024, {"recall": 16}, {"recall": phases})
    scores = {}
    for pattern in ("Dense", "Window"):
        trained_model = train(Run("recall", pattern, 0, sizes))
        scores[pattern] = trained_model["scores"][-1]["by_distance"]
    assert min(scores["Dense"][d][1] for d in (16, 32)) > 0.9
    assert (
        scores["Dense"][128][1] > 0.5 and scores["Dense"][252][1] > 0.3
    )  # 252: from 127 back on
    assert (
        scores["Window"][16][1] > 0.9 and scores["Window"][252][1] < 0.1
    )  # 2 layers of 48 keys: at most 96 back


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])


def test_a_training_that_is_killed_three_times_ends_with_the_same_numbers(tmp_path):
    """Each time some moments after a new checkpoint."""
    run = trained.small("recall", "BigBird", (32, 8, 200), (128, 4, 40))
    path, rng, seen = tmp_path / "killed" / f"{run.id}.pt", random.Random(0), 0
    for _ in range(3):
        _, process = started(run, path.parent)
        while not path.exists() or path.stat().st_mtime_ns == seen:
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        seen = path.stat().st_mtime_ns
    channels = [started(run, tmp_path / name)[0] for name in ("whole", "killed")]
    wanted, found = (channel.recv() for channel in channels)
    assert found == wanted
    assert len(wanted["losses"]) == 240 and len(wanted["scores"]) == 2


def started(run, folder):
    """(channel of its result, process) of a training."""
    ours, theirs = FORKS.Pipe(duplex=False)
    job = theirs, run, folder
    process = FORKS.Process(target=trained.with_checkpoints, args=job, daemon=True)
    process.start()
    theirs.close()
    return ours, process


def test_time_that_is_over_stops_at_a_checkpoint_and_a_loss_that_is_no_number_ends_the_run(
    tmp_path,
):
    run = trained.small("lists", "Window")
    assert train(run, tmp_path, until=0.0) is None
    assert train(run, tmp_path)["losses"] == train(run)["losses"]
    wild = Run("lists", "Window", 0, Sizes(**vars(run.sizes) | {"rate": 1e30}))
    with pytest.raises(FloatingPointError, match="the loss is"):
        train(wild)


def test_the_sizes_of_each_device_begin_where_every_pattern_sees_all():
    for sizes in SIZES.values():
        for task, phases in sizes.phases.items():
            assert task in TASKS and phases[0][0] <= 2 * sizes.blocks[task]
    run = trained.small("recall", "Dense")
    assert (
        run.id != trained.small("recall", "Window").id
        and run.id == trained.small("recall", "Dense").id
    )


# --------------------------------------------------------------------------------------
# rows

STORED = Path(__file__).resolve().parents[2] / "reports" / "cpu" / "data"
LATER = [*trainings.TASKS_OF]
FIRST = [name for name in patterns(16, 512) if name not in LATER]
PAIRS = [
    *zip(cycle(["recall", "copy", "lists"]), FIRST),
    *(("recall", x) for x in LATER),
]


@pytest.mark.parametrize("task, pattern", PAIRS)
def test_stored_rows_count_as_those_of_this_code_and_have_its_losses(task, pattern):
    """The mean of the first ten. Later ones differ by the instructions of the CPU: a
    difference of rounding grows in training.
    """
    rows = {row["id"]: row for row in trainings.read(STORED)}
    if not rows:
        pytest.skip("no rows are there")
    run = Run(task, pattern, 0, SIZES["cpu"])
    if pattern in LATER and run.id not in rows:
        pytest.skip(f"{pattern} has no row yet")
    row = rows[run.id]
    assert trainings.key(row["origin"])[0] == trainings.code()
    model, optimizer = build(run)
    seq, batch, _ = run.phases[0]
    total, losses = sum(steps for *_, steps in run.phases), []
    for i in range(trainings.AVERAGED):
        data = TASKS[task].batch(batch, seq, f"0 {i}")
        losses.append(step(model, optimizer, data, 1e-2 * rate_at(i, total)))
    mean = sum(losses) / len(losses)
    assert mean == pytest.approx(row["losses"][0], abs=1.5e-5, rel=0)


def test_what_has_no_row_is_trained_and_timed_once(tmp_path):
    some = [trained.small("recall", name) for name in ("Dense", "Window")]
    rows = trainings.run_all(tmp_path, device="cpu", wanted=some)
    assert [row["kind"] for row in rows] == ["trained"] * 2 + ["timed"] * 2
    assert {row["id"] for row in rows[:2]} == {run.id for run in some}
    alone = train(some[0])
    row = next(row for row in rows if row["id"] == some[0].id)
    assert row["status"] == "ok" and row["scores"][-1]["ended"]
    assert row["losses"][0] == pytest.approx(sum(alone["losses"]) / 10, abs=2e-5)
    assert [len(row["seconds"]) for row in rows[2:]] == [trainings.ROUNDS] * 2
    before = (tmp_path / trainings.NAME).read_bytes()
    trainings.run_all(tmp_path, device="cpu", wanted=some)
    assert (tmp_path / trainings.NAME).read_bytes() == before


def test_a_training_without_an_end_is_a_row_that_says_why(tmp_path):
    """Killed, diverged, stopped by an error; and the others go on."""
    long = trained.small("recall", "Dense", (32, 4, 100_000))

    others = {*multiprocessing.active_children()}  # of other tests

    def kill():
        while not (children := {*multiprocessing.active_children()} - others):
            time.sleep(0.01)
        os.kill(children.pop().pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    [(_, row)] = trainings.in_processes([long], tmp_path, "cpu", math.inf, 1)
    killer.join()
    assert row["status"] == "crashed" and "was ended by SIGKILL" in row["reason"]
    some = trained.small("lists", "Window")
    wild = replace(some, sizes=replace(some.sizes, rate=1e30))
    unknown = replace(some, pattern="Diagonal")
    rows = trainings.run_all(tmp_path, device="cpu", wanted=[wild, unknown, some])
    found = {row["id"]: (row["status"], row["reason"]) for row in rows}
    assert found[wild.id][0] == "diverged" and "the loss is" in found[wild.id][1]
    assert found[unknown.id] == ("crashed", "KeyError: 'Diagonal'")
    assert found[some.id] == ("ok", "")


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    for given, code in (
        (["--minutes", "0"], 2),
        (["--profile", "h100"], 2),
        (["--profile", "cpu", "--data", str(tmp_path)], 1),
    ):
        with Store(tmp_path, trainings.NAME):
            assert trainings.main(given) == code
        told = capsys.readouterr().err
        assert told.startswith("quality: ") and told.count("\n") == 1

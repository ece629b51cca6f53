"""What ranks run in the tests: importable by name, so that other processes find it."""

import copy
import io
import pickle
import time
import warnings
from functools import partial
from itertools import pairwise

import pytest
import ringlab
import torch
import torch.distributed as dist
from matrix import Case, apart, drawn
from model import LanguageModel, generate
from ringlab import (
    Adaptive,
    Execution,
    KVCache,
    Selected,
    Simulated,
    adaptive_attention,
    attention,
    baselines,
    kernels,
)
from ringlab.block_patterns import sliding_window
from ringlab.cache import PatternCache
from ringlab.kernels.torch_kernels import Eager
from ringlab.nn import (
    MultiheadAttention,
    average_gradients,
    mean_loss,
    next_tokens,
    shard_sequence,
)
from ringlab.patterns import Dense, Dilated
from ringlab.ring import (
    PlanMismatch,
    Problem,
    comm,
    contiguous,
    counting,
    hilbert,
    launch,
)
from ringlab.ring.group import Group
from ringlab.ring.rank import rank_of
from ringlab.ring.schemes import SCHEMES
from ringlab.torch_private import IN_GRAPHS
from ringlab.tracking import LiveStorageTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def cached(cases, group=None):
    """Of each (case, sizes of chunks): out, lse, the rows kept, and the bytes sent."""
    found, group = [], group or dist.group.WORLD
    for case, sizes in cases:
        made = {
            "batch": case.batch,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "head_dim": case.d,
        }
        cache = KVCache(
            case.pattern, max_seq_len=case.n + 9, dtype=case.dtype, group=group, **made
        )
        with counting() as traffic:
            *tensors, sinks = (*drawn(case)[0], None)[:4]
            how = {"causal": True, "cache": cache, "sinks": sinks, "return_lse": True}
            parts = zip(*(t.split(sizes, 1) for t in tensors))
            parts = [attention(*some, case.pattern, **how) for some in parts]
        out, lse = (torch.cat(each, dim) for each, dim in zip(zip(*parts), (1, 2)))
        found.append((out, lse, cache.live_rows(), traffic.total))
    return found


def generated(pattern, group="world"):
    """What a small model generates, with the ranks' caches or (group None) its own."""
    torch.manual_seed(0)
    group = group and dist.group.WORLD
    model = LanguageModel(50, 32, 4, [pattern] * 2, group=group, dtype=torch.float64)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens = torch.arange(60).reshape(2, 30) % 50
    return generate(model, tokens, 20, lengths=[30, 11])


BORDERS = [0, 20, 32, 64]


def trained(how: str, kind: str = "ours", steps: int = 20) -> list[float]:
    """The losses of training on two packed sequences: on "one" device, on the ranks of
    "sequence", or "fsdp" with 2 x 2 ranks of sequence and data. ``kind``: our model, or
    one of transformers. By SGD: Adam is blind to a gradient's size.
    """
    groups, data = {}, [0, 1]
    if how != "one":
        shape = (dist.get_world_size(),) if how == "sequence" else (2, 2)
        mesh = init_device_mesh(
            "cpu", shape, mesh_dim_names=("sequence", "data")[: len(shape)]
        )
        groups = {name: mesh[name] for name in mesh.mesh_dim_names}
        data = [mesh["data"].get_local_rank()] if "data" in groups else data
    sequence = groups.get("sequence", Simulated(1))
    torch.manual_seed(1)
    pattern = Dilated([8, 32], [1, 2])
    if kind == "ours":
        patterns = [pattern, sliding_window(2, block_size=8)]
        model = LanguageModel(40, 32, 4, patterns, group=groups.get("sequence"))
        layers = model.blocks
    else:
        from ringlab.integrations.transformers import shard_inputs

        model = llama(pattern)
        layers = model.model.layers
    if how == "fsdp":
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer, generator, losses = (
        torch.optim.SGD(model.parameters(), 0.5),
        torch.Generator().manual_seed(2),
        [],
    )
    for _ in range(steps):
        tokens = torch.randint(5, (2, 1, 64), generator=generator)[data]
        logits, targets = [], []
        for some in tokens:
            targets.append(shard_sequence(next_tokens(some, BORDERS), sequence))
            if kind == "ours":
                shard = shard_sequence(some, sequence)
                logits.append(model(shard, cu_seqlens=BORDERS))
            else:
                shards = shard_inputs(sequence, some, cu_seqlens=BORDERS)
                logits.append(model(**shards).logits)
        loss = mean_loss(torch.cat(logits), torch.cat(targets), *groups.values())
        optimizer.zero_grad()
        loss.backward()
        if how == "sequence":
            average_gradients(model, sequence)
        optimizer.step()
        losses.append(float(loss))
    return losses


def tensor_parallel(cases):
    """Of each case (pattern, heads, kv_heads, projections) on a mesh of all ranks: the
    error of a layer whose ``projections`` are shared out, at once and by pieces with a
    cache, or what refuses.
    """
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for pattern, heads, kv_heads, names in cases:
        torch.manual_seed(0)
        layer = MultiheadAttention(
            8 * heads,
            heads,
            pattern,
            num_kv_heads=kv_heads,
            causal=True,
            rotary_base=100.0,
            dtype=torch.float64,
        ).requires_grad_(False)
        x = torch.randn(2, 40, 8 * heads, dtype=torch.float64)
        want = layer(x)
        plan = {f"{name}_proj": ColwiseParallel() for name in names}
        parallelize_module(layer, mesh, plan | {"out_proj": RowwiseParallel()})
        try:
            got = [layer(x)]
            if not isinstance(pattern, Adaptive):
                cache = layer.make_cache(2, 60)
                pieces = [layer(t, cache=cache) for t in x.split([17, 1, 22], 1)]
                got.append(torch.cat(pieces, 1))
            found.append(apart(got, [want] * len(got)))
        except (NotImplementedError, RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


def copies():
    """What this rank finds of everything that holds a group: the names of those whose
    copies or pickles are not as the original, and a pickle of one.
    """
    ranks = list(range(dist.get_world_size()))
    some, wrong = dist.new_group(ranks), []
    torch.manual_seed(0)
    x = torch.randn(1, 8, 32)
    q = x.unflatten(-1, (4, 8))
    for group in (dist.group.WORLD, some):
        cache = KVCache(
            Dense(), batch=1, heads=4, head_dim=8, max_seq_len=9, group=group
        )
        holders = [
            (MultiheadAttention(32, 4, Dense(), group=group), (x,)),
            (ringlab.AdaptiveBlockSparse(8, 4, 1, group=group), (q, q, q)),
            (ringlab.RingDilatedAttentionV2([8, 16], [1, 2], group=group), (q, q, q)),
            (cache, None),
        ]
        for one, given in holders:
            file = io.BytesIO()
            torch.save(one, file)
            file.seek(0)
            made = [copy.copy(one), copy.deepcopy(one)]
            made.append(torch.load(file, weights_only=False))
            if given is not None:
                made.append(torch.optim.swa_utils.AveragedModel(one))
            for other in made:
                if given is None:
                    same = other.group.process_group is group
                else:
                    same = torch.equal(other(*given), one(*given))
                if not same:
                    wrong.append((type(one).__name__, made.index(other)))
    return wrong, pickle.dumps(holders[0][0])


def unpickled(saved: bytes) -> str:
    """What refuses the pickle of a group of another size and the same name."""
    dist.new_group([dist.get_rank()])
    try:
        pickle.loads(saved)
    except RuntimeError as error:
        return str(error)


def micro_batches():
    """Loss and gradient of one batch and of its three micro-batches with other numbers
    of targets, over the ranks; and what refuses totals that are wrong.
    """
    group, found = dist.group.WORLD, []
    torch.manual_seed(0)
    x = torch.randn(3, 16, 8, dtype=torch.float64)
    targets = next_tokens(torch.randint(11, (3, 16)), lengths=[16, 3, 10])
    x, targets = (shard_sequence(t, group) for t in (x, targets))
    model = torch.nn.Linear(8, 11, dtype=torch.float64)
    for parts, total in ((1, None), (3, 26)):
        model.zero_grad()
        losses = [
            mean_loss(model(some), wanted, group, total=total)
            for some, wanted in zip(x.chunk(parts), targets.chunk(parts))
        ]
        sum(losses).backward()
        average_gradients(model, group)
        found.append(
            [sum(losses).detach(), *(p.grad.clone() for p in model.parameters())]
        )
    for total in (26 + dist.get_rank(), 20):
        try:
            mean_loss(model(x), targets, group, total=total)
        except ValueError as error:
            found.append(str(error))
    return found


def two_steps(names: tuple[str, ...] = ()):
    """Losses, the first gradients and the weights after two steps of a small model,
    whole, on a 2 x 2 mesh of two ``names``, or in this process alone.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if names else None
    torch.manual_seed(0)
    model = LanguageModel(
        40,
        32,
        4,
        [Dilated([8, 32], [1, 2]), Dense()],
        num_kv_heads=2,
        group=mesh["sequence"] if "sequence" in names else None,
        hidden_dim=64,
        dtype=torch.float64,
    )
    if "tensor" in names:
        columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
        for block in model.blocks:
            plan = dict.fromkeys((*columns, "gate", "up"), ColwiseParallel())
            plan |= dict.fromkeys(("attention.out_proj", "down"), RowwiseParallel())
            parallelize_module(block, mesh["tensor"], plan)
    groups = [mesh[name] for name in names if name != "tensor"]
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9, foreach=False)

    def whole(tensors):
        return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]

    tokens = torch.randint(40, (2, 64))
    given = [tokens, next_tokens(tokens, lengths=[64, 50])]
    if "data" in names:
        given = [t.chunk(2)[mesh["data"].get_local_rank()] for t in given]
    if "sequence" in names:
        given = [shard_sequence(t, mesh["sequence"]) for t in given]
    losses, first = [], None
    for _ in range(2):
        loss = mean_loss(model(given[0]), given[1], *groups)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, *groups)
        first = first or [t.clone() for t in whole(p.grad for p in model.parameters())]
        optimizer.step()
        losses.append(loss.detach())
    if "tensor" in names:
        with pytest.raises(ValueError, match="^ranks .* have parts of one gradient.*$"):
            average_gradients(model, mesh["tensor"])
    return losses, first, [t.detach() for t in whole(model.parameters())]


def llama(pattern):
    from ringlab.integrations.transformers import register, set_pattern
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=40, num_key_value_heads=2, pad_token_id=0, **sizes)
    return set_pattern(
        LlamaForCausalLM._from_config(config, attn_implementation="ringlab"), pattern
    )


def sharded_models(cases) -> list:
    """Of each (class of transformers, layout, borders or None): how far this rank's
    loss and averaged gradients are from one device, each document alone; then what is
    told where rank 1 has wrong positions.
    """
    from model_sweep import made, small, tokens
    from ringlab.integrations.transformers import register, shard_inputs

    register()
    group, found, n = dist.group.WORLD, [], 23
    text, where = tokens(1, n), torch.arange(n)
    for name, layout, borders in cases:
        model = made(name, "ringlab", small(name, sliding_window=6))
        ends = borders or [0, n]
        labels = text.masked_fill((where < 9) | (where >= ends[-1]), -100)
        logits = [model(text[:, a:b]).logits for a, b in pairwise(ends)]
        want = mean_loss(torch.cat(logits, 1), next_tokens(labels)[:, : ends[-1]])
        shards = shard_inputs(group, text, labels, layout=layout, cu_seqlens=borders)
        results = []
        for loss in (want, model(**shards).loss):
            model.zero_grad()
            loss.backward()
            average_gradients(model, group)
            grads = [p.grad.clone() for p in model.parameters()]
            results.append([loss.detach(), *grads])
        found.append(apart(*results))
    shards["position_ids"] = shards["position_ids"] + dist.get_rank()
    return [*found, told(model, **shards)]


def unequal_chunks():
    cache = KVCache(
        Dense(), batch=1, heads=2, head_dim=8, max_seq_len=16, group=dist.group.WORLD
    )
    q = torch.zeros(1, 2 + dist.get_rank(), 2, 8)
    attention(q, q, q, Dense(), causal=True, cache=cache)


def parity(cases, device="cpu", staged=False):
    """Each case's results on this rank, the bytes that it sent, and those of comparing
    before; ``staged`` as a GPU's tensors go over gloo.
    """
    if staged:
        comm._through_cpu = lambda *_: True
    results = []
    for case in cases:
        given = case.shards(dist.get_rank(), device)
        with counting() as traffic:
            found = case.run(*given, dist.group.WORLD)
        results.append(
            (
                {name: t.cpu() for name, t in found.items()},
                traffic.total,
                traffic.control,
            )
        )
    return results


def parity_over_a_mesh(cases):
    """Each case's results on this rank: over a mesh of all ranks, or of half of them
    beside another one.
    """
    results, ranks = [], dist.get_world_size()
    for case in cases:
        apart = ranks // case.layout.ranks
        mesh = dist.init_device_mesh(
            "cpu", (apart, *case.mesh), mesh_dim_names=("data", "rows", "columns")
        )["rows", "columns"]
        own = mesh.mesh.flatten().tolist().index(dist.get_rank())
        results.append(case.run(*case.shards(own), mesh))
    return results


def part_of_the_processes(case):
    """The results of a case over a 2-D mesh of all processes but the last, which takes
    part in a new group of all afterwards.
    """
    members = torch.arange(case.layout.ranks).view(case.mesh)
    mesh, results = dist.DeviceMesh("cpu", members), None
    if dist.get_rank() < case.layout.ranks:
        results = case.run(*case.shards(dist.get_rank()), mesh)
    sums = torch.ones(1)
    dist.all_reduce(sums, group=dist.new_group())
    return results, int(sums)


def as_simulated(cases):
    """What ``parity`` gives by rank in processes: in every bit and in bytes what the
    simulated ranks give.
    """
    ranks = cases[0].layout.ranks
    everyone = launch.launch(parity, ranks, cases)
    for i, case in enumerate(cases):
        with counting() as traffic:
            want = case.run(*drawn(case))
        found = case.joined([each[i][0] for each in everyone])
        sums = [x.pop("dz") for x in (found, want) if case.sinks]  # over the ranks
        assert not sums or torch.allclose(*sums, rtol=1e-12), case
        assert all(torch.equal(found[name], t) for name, t in want.items()), case
        assert [each[i][1] for each in everyone] == [
            traffic.from_rank(rank) for rank in range(ranks)
        ]
    return everyone


def told(call, *args, **how) -> str:
    """What a rank is told that does not agree with the others."""
    try:
        call(*args, **how)
    except PlanMismatch as error:
        return str(error)
    return "nothing"


def refused_by_rank_1() -> dict[str, str]:
    """What this rank is told where rank 1 alone makes a wrong call; then whether the
    next call runs.
    """
    group, wrong = dist.group.WORLD, bool(dist.get_rank())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("rows", "columns"))
    q, found, dense = torch.ones(1, 4, 4, 8), {}, Dense()

    def call(name, function, *args, **how):
        found[name] = told(function, *args, **how)

    def attend(name, tensors=(q, q, q), pattern=dense, over=group, **how):
        call(name, attention, *tensors, pattern, **{"group": over} | how)

    attend("borders", cu_seqlens=[1, 0] if wrong else None)
    attend("documents", lengths=[4] if wrong else None)
    attend("heads", (q, q[:, :, : 3 if wrong else 4], q[:, :, : 3 if wrong else 4]))
    attend("gradient", (q.clone().requires_grad_(not wrong), q, q))
    attend("layout", layout=contiguous(4 if wrong else 8, 2))
    attend("ulysses", scheme="ulysses", causal="yes" if wrong else True)
    scheme = ("ring", "rings" if wrong else "ulysses")
    attend("mesh", over=mesh, scheme=scheme)
    lists = Selected(torch.zeros(1, 1, 4, 1, dtype=torch.int64))
    attend("selected", pattern=lists, sinks=torch.zeros(3 if wrong else 4))
    made = {"batch": 1, "heads": 4, "head_dim": 8, "max_seq_len": 9, "group": group}
    how = {"causal": True, "cache": KVCache(Dense(), **made), "over": None}
    attend("cache", lengths=[5 if wrong else 4], **how)
    pattern = Adaptive(2, 9 if wrong else 1)
    call("adaptive", adaptive_attention, q, q, q, pattern, group=group)
    torch.manual_seed(0)
    layer = MultiheadAttention(32, 4, Dense(), group=group)
    call("layer", layer, torch.ones(1, 4, 31 if wrong else 32))
    targets = torch.zeros(1, 5 if wrong else 4, dtype=torch.int64)
    call("loss", mean_loss, torch.ones(1, 4, 8), targets, group)
    call("gradients", average_gradients, torch.nn.Linear(2, 3 if wrong else 2), group)
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight.grad = torch.eye(2).to_sparse() if wrong else torch.eye(2)
    call("kinds", average_gradients, layer, group)
    attend("right")
    return found


def averaged() -> list[list]:
    """Gradients of modules once they are averaged over two ranks, as lists; None where
    there is none.
    """
    rank, found = dist.get_rank(), []
    for shapes in ([(1,), (1,), (1,)], [(2, 3), (2,), (1,)]):
        module = torch.nn.ParameterList(torch.zeros(s) for s in shapes)
        parameter = module[rank]  # of one rank each, and one that none has
        parameter.grad = torch.full_like(parameter, 10.0 + rank)
        average_gradients(module, dist.group.WORLD)
        found.append([None if p.grad is None else p.grad.tolist() for p in module])
    grad = torch.arange(6.0).view(3, 2)
    rows = torch.sparse_coo_tensor([[0]], [[1.0, 2.0]], (3, 2))
    for given in ((grad, grad.T.contiguous().T), (None, rows)):
        module = torch.nn.Linear(2, 3, bias=False)
        module.weight.grad = given[rank]
        average_gradients(module, dist.group.WORLD)
        found.append(module.weight.grad.to_dense().tolist())
    return found


def mismatch(calls, layout, order=None):
    """What this rank is told when it makes its own of the ``calls`` by rank: pairs
    (pattern, causal), or with sinks and a soft cap.

    ``order``: by rank, which of the first rank's calls are made again once all ranks
    have made them; -1, -2, ... are the backward of the last of these, the one before,
    ...
    """
    rank = dist.get_rank()
    inputs, dout, _ = Case(Dense(), layout.n, heads=2, d=8, layout=layout).shards(rank)
    shards = [t.requires_grad_() for t in inputs]

    def forward(pattern, causal, sinks=None, softcap=None):
        return attention(
            *shards,
            pattern,
            causal=causal,
            sinks=sinks,
            softcap=softcap,
            group=dist.group.WORLD,
            scheme="plan",
            layout=layout,
        )

    def each():
        outs = [forward(*made) for made in calls[0 if order else rank]]
        for i in order[rank] if order else ():
            if i < 0:
                torch.autograd.grad(outs[i], shards, dout, retain_graph=True)
            else:
                forward(*calls[0][i])

    return told(each)


def without_private_names(case):
    """The same step with torch's private table of process groups, and without."""
    given = *case.shards(dist.get_rank()), dist.group.WORLD
    found = [case.run(*given)]
    del dist.distributed_c10d._resolve_process_group
    return found + [case.run(*given)]


def late_rank(channel, rank, *rest):
    """A rank of ``launch`` of which number 1 never joins."""
    if rank == 1:
        time.sleep(1000)
    launch._rank(channel, rank, *rest)


def two_meshes(cases):
    """Data x sequence parallel on 2 x 2 ranks: two sequences, each over its own pair."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    data, rank = mesh["data"].get_local_rank(), mesh["sequence"].get_local_rank()
    return data, cases[data].run(*cases[data].shards(rank), mesh["sequence"])


def compiled(cases):
    """Of each case: eager and fullgraph-compiled results on this rank, and the
    exchanges of each way of a step.
    """
    return list(map(_compiled, cases))


def _compiled(case):
    leaves, dout, _ = case.shards(dist.get_rank())
    leaves = [t.requires_grad_() for t in leaves]
    how = {"group": dist.group.WORLD, "scheme": case.scheme, "layout": case.layout}

    def step(q, k, v):
        return attention(q * 2, k, v, case.pattern, **how).sin()

    def save(ctx, op, *args, **kwargs):
        ours = op == torch.ops.ringlab.ranks_forward.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    saving = partial(create_selective_checkpoint_contexts, save)
    replayed = partial(checkpoint, step, use_reentrant=False)
    results, messages = [], []
    for run in (
        step,
        torch.compile(step, fullgraph=IN_GRAPHS, backend="aot_eager"),
        replayed,
        partial(replayed, context_fn=saving),
    ):
        with counting() as traffic:
            out = run(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        messages.append(traffic.messages)
    return results, messages


def short_of_memory(case):
    """One step of the production module where rank 1's third kernel call fails, and
    what it took.
    """
    rank = dist.get_rank()
    (q, k, v), dout, _ = case.shards(rank)
    right, calls, failures = Eager.forward, [], []

    def forward(eager, *args):
        calls.append(0)
        if rank == 1 and len(calls) == 3:
            failures.append(0)
            raise torch.OutOfMemoryError("as told")
        return right(eager, *args)

    def step(module):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with counting() as traffic:
            out = module(*leaves, is_causal=True)
            values = dict(
                zip(
                    ("out", "dq", "dk", "dv"),
                    (out.detach(), *torch.autograd.grad(out, leaves, dout)),
                )
            )
        return values, (traffic.total, traffic.messages)

    lengths, rates = case.pattern.segment_lengths, case.pattern.dilation_rates
    made = [
        ringlab.RingDilatedAttentionProduction(
            lengths, rates, group=dist.group.WORLD, dtype=q.dtype
        )
        for _ in range(3)
    ]
    for module in made:
        module.chain = "eager"
    step(made[0])  # the ranks compare what they are about to do once
    _, sent = step(made[1])
    Eager.forward = forward
    values, sent_then = step(made[2])
    levels = (made[2].execution.tile.level,)
    made[2].agree()
    cache = PatternCache()
    out = attention(
        q.requires_grad_(),
        k,
        v,
        Dense(),
        group=dist.group.WORLD,
        scheme="ring",
        execution=Execution(cache=cache, tile=8),
    )
    used = cache.stats().misses
    out.sum().backward()  # nobody but the graph holds that execution any more
    return {
        "values": values,
        "levels": levels + (made[2].execution.tile.level,),
        "failures": len(failures),
        "sent": sent_then,
        "sent without failure": sent,
        "cached": used,
    }


def layer_gradients(scheme, layout):
    """Parameter gradients of a layer for this rank's shard (layout None: all rows), at
    once and by micro-batches.
    """
    group = dist.group.WORLD
    ranks = {"group": group, "scheme": scheme, "layout": layout} if layout else {}
    torch.manual_seed(0)
    layer = MultiheadAttention(
        16,
        4,
        Dilated([12, 36], [1, 2]),
        num_kv_heads=2,
        causal=True,
        rotary_base=100.0,
        dtype=torch.float64,
        **ranks,
    )
    x, dout = torch.randn(2, 4, 48, 16, dtype=torch.float64)
    if layout:
        x, dout = (shard_sequence(t, group, layout=layout) for t in (x, dout))
    once = torch.autograd.grad(layer(x), list(layer.parameters()), dout)
    for part, cotangent in zip(x.split(1), dout.split(1)):
        layer(part).backward(cotangent)
    return list(once), [p.grad for p in layer.parameters()]


def error_of_original(name, group="world"):
    """How far a layer of the original is from ``linear`` and ``attention`` with its
    weights: out and all gradients, of this rank's rows or (group None) on one device.
    """
    torch.manual_seed(0)
    group = Simulated(1) if group is None else dist.group.WORLD
    made = getattr(ringlab, name)
    layer = made(32, 4, [8, 64], [1, 2], dtype=torch.float64, group=group)
    x, dout = torch.randn(2, 2, 48, 32, dtype=torch.float64)
    leaves = [x.requires_grad_(), *layer.parameters()]
    qkv = F.linear(*leaves[:3]).unflatten(-1, (3, 4, 8)).unbind(2)  # (b, n, h, d)
    curved = "Hilbert" in name
    how = {"layout": hilbert(6, 8, 1), "scheme": "plan"} if curved else {"causal": True}
    pattern = Dilated([8, 64], [1, 2], "head_groups", "branch")
    rows = attention(*qkv, pattern, group=group, **how).flatten(2)
    outs = layer(x, is_causal=not curved), F.linear(rows, *leaves[3:])
    return apart(*([t.detach(), *torch.autograd.grad(t, leaves, dout)] for t in outs))


def peaks_of_a_shard(cases, n, heads, d):
    """By (pattern, scheme): the peak bytes of one forward on this rank, its q, k, v
    among them.
    """

    layout, me, peaks = contiguous(n, dist.get_world_size()), dist.get_rank(), []
    q, k, v = (torch.randn(1, layout.size(me), heads, d) for _ in range(3))
    for pattern, scheme in cases:
        # The algorithm itself: the operator around it is one step to a tracker, which
        # sees nothing inside.
        kernel = kernels.choose(q.device, q.dtype, d).kernel
        rank = rank_of(
            Problem(pattern, layout, False, heads, heads), me, kernel, 1.0, Execution()
        )
        for _ in range(2):  # the first call makes the plan
            with LiveStorageTracker() as tracker:
                tracker.register(q, k, v)
                comm.drive(
                    [SCHEMES[scheme][0](rank, q, k, v)], Group.of(dist.group.WORLD)
                )
        peaks.append(tracker.peak_bytes)
    return peaks


def warnings_of_bsr():
    """What is warned of in the first call of this process by BSR tensors, and its
    backward.
    """
    q, pattern = (
        torch.ones(1, 20, 2, 8, requires_grad=True),
        ringlab.blocks.sliding_window(1, block_size=8),
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        baselines.attend(q, q, q, pattern, "bsr")[0].sum().backward()
    return [str(w.message) for w in told]


def content_disagreed(cases):
    """What this rank is told in each case; every rank passes its own number of blocks,
    pattern, and shape of z or None.
    """
    rank, found = dist.get_rank(), []
    for blocks, pattern, shape in (each[rank] for each in cases):
        q = torch.randn(1, 8 * blocks, 2, 8)
        z = None if shape is None else torch.zeros(shape)
        given = q, q, q, pattern, z
        found.append(told(adaptive_attention, *given, group=dist.group.WORLD))
    return found


def borders_disagreed(borders):
    """What this rank is told for its own borders."""
    q = torch.zeros(1, 8, 2, 8)
    return told(
        attention,
        q,
        q,
        q,
        Dense(),
        group=dist.group.WORLD,
        cu_seqlens=borders[dist.get_rank()],
    )

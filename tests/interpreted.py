"""Run by test_triton.py where TRITON_INTERPRET=1: the list kernels on small CPU tensors, against the oracle.

Prints one JSON object a line: a case, the error and the bound of each result.
"""

import json

import torch
from helpers import NAMES, errors, results
from ringlab import Dense, Dilated, attention, blocks, kernels, pieces, reference
from ringlab.kernels import KERNELS, triton_lists, triton_op

F16, F32 = torch.float16, torch.float32
# pattern, n, heads, K/V heads, head_dim, causal, dtype, scale, tile
CASES = {
    "folded, causal, grouped": (Dilated([32, 64], [1, 2]), 41, 2, 1, 16, True, F32, None, (16, 16)),
    "folded thrice, half": (Dilated([32, 32, 32], [1, 1, 2]), 35, 1, 1, 16, False, F16, None, (16, 32)),
    "several launches, rows uncovered": (Dilated([8, 16], [3, 2], offsets="branch"), 20, 2, 1, 16, True, F16, 0.5,
                                         (16, 16)),
    "several launches, batch": (Dilated([6, 20], [1, 4], offsets="block"), 9, 1, 1, 16, False, F32, None, (16, 16)),
    "head groups of unlike rates": (Dilated([16, 8], [3, 2], "head_groups"), 19, 3, 1, 16, True, F32, None, (16, 16)),
    "block-sparse": (blocks.local_global(0, 1, block_size=16), 39, 2, 1, 16, True, F32, None, (16, 16)),
    "block-sparse, queries that see nothing": (
        blocks.from_mask(torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]]) > 0, block_size=16), 45, 1, 1, 16, True, F16,
        None, (16, 16),
    ),
    "dense, padded head_dim, negative scale": (Dense(), 33, 1, 1, 24, True, F16, -0.3, (32, 16)),
    "dense, odd head_dim, scale 0": (Dense(), 18, 1, 1, 5, False, F32, 0.0, (32, 16)),
}  # fmt: skip


def inside_inf(*shape, dtype) -> torch.Tensor:
    """Random numbers as a view into a buffer of inf: whoever reads past it shows it."""
    b, n, heads, d = shape
    return torch.full((b, n + 40, heads, d + 30), torch.inf, dtype=dtype)[:, :n, :, :d].copy_(torch.randn(shape))


def run(pattern, n, heads, kv_heads, d, causal, dtype, scale, tile, batch=1):
    triton_lists.sizes = lambda *_: triton_lists.Sizes(*tile, 4, 1)
    torch.manual_seed(0)
    q, k, v = (inside_inf(batch, n, h, d, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    dout, dlse = inside_inf(batch, n, heads, d, dtype=dtype), torch.randn(batch, heads, n, dtype=torch.float64)
    options = {"causal": causal, "scale": scale}
    out, lse = attention(q, k, v, pattern, backend="triton", return_lse=True, **options)
    got = results(out, lse, q, k, v, dout, dlse)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = results(*reference.attention(*exact, pattern, **options), *exact, dout, dlse)
    # A dense kernel that masks before it scales makes no bound for a negative scale; -q with -scale is the same.
    flip = -1 if scale is not None and scale < 0 else 1
    options["scale"] = None if scale is None else flip * scale
    bound = reference.tolerance(flip * q, k, v, dout, pattern=pattern, **options)
    return {"error": errors(got, want, q, k, dout, scale), "bound": bound}


def show(name: str, **found) -> None:
    print(json.dumps({"case": name, **found}), flush=True)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN, so that a row which nobody wrote shows
    pieces.LONG = 1  # fold short branches too
    kernels.PROBE_ROWS = 20  # interpreted, a program takes milliseconds
    for name, case in CASES.items():
        show(name, **run(*case, batch=2 if "batch" in name else 1))
    folded = CASES["folded, causal, grouped"]
    counted = triton_lists.make_lists
    triton_lists.make_lists = lambda *args, **more: once(counted(*args, **more))
    triton_lists.caches.GLOBAL.clear()
    show("each pair once", **run(*folded))
    triton_lists.make_lists = counted
    triton_lists.caches.GLOBAL.clear()
    compiled(Dilated([8, 16], [1, 2]), 18, 1, 1, 16)
    show("bfloat16", refusal=KERNELS["triton"].refuses(torch.device("cpu"), torch.bfloat16, 64))


def once(lists):
    """The lists with M = 1 throughout: an answer that must be found wrong."""
    lists.entries[:, 1] -= (lists.entries[:, 1] >> 9 & 255).sub(1).clamp(min=0) << 9
    return lists


def compiled(pattern, n, heads, kv_heads, d):
    """One graph, without a break, equal in every bit to the call outside of graphs; and torch's own checks."""
    q, k, v = (torch.randn(1, n, h, d, requires_grad=True) for h in (heads, kv_heads, kv_heads))

    def step(q, k, v):
        return attention(q, k, v, pattern, causal=True, scale=-0.3, backend="triton", return_lse=True)

    graph = torch.compile(step, fullgraph=True, backend="aot_eager")
    a, b = (results(*f(q, k, v), q, k, v, torch.ones(()), torch.ones(1, heads, n)) for f in (step, graph))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    text = triton_op._text(pattern)
    checks = torch.library.opcheck(triton_op.lists_forward, (q, k, v, text, True, 0.25), test_utils=tests)
    show("compiled", same={name: torch.equal(a[name], b[name]) for name in NAMES}, checks=checks)


if __name__ == "__main__":
    main()

"""Systems that choose keys by content and attend to them: MoBA, NSA, DSA,
vertical-slash of MInference, and adaptive blocks. Choosing and planning are inside the
time.
"""

from functools import partial

import torch
from torch import Tensor

from .. import adaptive, attention, reference, selection
from ..block_patterns import sliding_window
from ..cost import PASSES, Cost
from ..selected import Selected
from .points import Point
from .systems import (
    Checked,
    Output,
    Refused,
    System,
    parse_options,
    refusing,
    without_reach,
)


def adaptive_blocks(q: Tensor, k: Tensor, *, causal: bool, **options) -> Selected:
    """Blocks that the means of q and k choose."""
    return adaptive.choose(q, k, adaptive.Adaptive(**options), causal=causal)


CHOICES = {  # what chooses, and its options by default
    "moba": (selection.moba, {"block_size": 128, "top_k": 8}),
    "nsa": (selection.nsa_blocks, {"block_size": 64, "top_k": 16, "window": 512}),
    "dsa": (selection.dsa, {"top_k": 2048, "index_heads": 4, "index_dim": 32}),
    "vertical_slash": (
        selection.vertical_slash,
        {"block_size": 64, "vertical": 8, "slash": 8},
    ),
    "adaptive": (adaptive_blocks, {"block_size": 64, "top_k": 8}),
}
NOT_OF_CHOICE = "window", "index_heads", "index_dim"
OTHERS = 1e-3  # part of a choice that rounding may change


def seen_pairs(choice: Selected, n: int, causal: bool = True) -> int:
    """Pairs of a query and a key that a choice shows, of all its groups."""
    blocks = choice.listed().sort(3).values
    again = blocks[..., 1:] == blocks[..., :-1]
    blocks[..., 1:] = blocks[..., 1:].masked_fill(again, -1)
    at = torch.arange(n, device=blocks.device)
    blocks = blocks[:, :, at // choice.query_block]  # (b, groups, n, slots)
    keys = (at[:, None] + 1 if causal else n) - blocks * choice.granularity
    return int(keys.clamp(0, choice.granularity).masked_fill(blocks < 0, 0).sum())


class Choosing(System):
    """A choice and attention to it, causal, but adaptive blocks in any case; options as of the functions in
    ``ringlab.selection``. ``choice=True``: the choice alone.

    The check compares with the oracle on the chosen keys; of the choice alone, with
    that in float64. Raises Refused for a batch, a pattern, a pass that is not causal or
    a backward of a choice for prompts.
    """

    def __init__(self, point: Point, device):
        self.function, defaults = CHOICES[point.system]
        self.options = defaults | parse_options(point, "choice", *defaults)
        self.alone = self.options.pop("choice", False)
        causal = point.causal
        if point.system == "adaptive":
            self.function = partial(self.function, causal=point.causal)
            causal = True
        if point.batch != 1 or not causal or point.pattern["kind"] != "dense":
            raise Refused(
                f"{point.system} is measured with batch 1, causal and a dense pattern, of which it chooses keys"
            )
        if point.passes != "fwd" and (self.alone or point.system == "vertical_slash"):
            raise Refused("a choice, and attention to vertical-slash, has no backward")
        super().__init__(point, device)
        floor_bytes = self.cost.floor_bytes
        with refusing():
            q, k, *_ = self.inputs()
            choice = self.choose(q, k)
        if self.alone:
            self.cost = Cost(0, 0, 0, 0, q.nbytes + k.nbytes)
            return
        shared = point.heads // choice.indices.shape[1]
        pairs = seen_pairs(choice, point.seq_len, point.causal)
        pairs = shared * pairs + self.other_pairs()
        flops = PASSES[point.passes] * point.head_dim * pairs
        self.cost = Cost(pairs, pairs, flops, flops, floor_bytes)

    def other_pairs(self) -> int:
        """Pairs besides those of the choice."""
        return 0

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """What the choice is made from."""
        return q, k

    @torch.no_grad()
    def choose(self, q: Tensor, k: Tensor, wide: bool = False) -> Selected:
        features = self.features(q, k)
        if wide:
            features = [t.double() for t in features]
        own = {x: y for x, y in self.options.items() if x not in NOT_OF_CHOICE}
        return self.function(*features, **own)

    def forward(self, q, k, v):
        choice = self.choose(q, k)
        return attention(q, k, v, choice, causal=self.point.causal, return_lse=True)

    def run(self, inputs: list[Tensor]) -> Output:
        if self.alone:
            return Output(self.choose(*inputs[:2]).indices)
        return super().run(inputs)

    def check(self, inputs: list[Tensor], output: Output, starts=(None,)) -> Checked:
        q, k = inputs[:2]
        if self.alone:
            right = self.choose(q, k, wide=True).indices
            apart = output.out.sort(3).values != right.sort(3).values
            self.tolerance = {"out": OTHERS}
            return {"out": float(apart.double().mean())}, self.tolerance
        self.pattern = self.choose(q, k)
        return super().check(inputs, output, starts)


class Indexed(Choosing):
    """DSA with an indexer of random weights on q of all heads, in place of the hidden
    state; options ``top_k``, ``index_heads``, ``index_dim``. It is not trained here.
    """

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        heads = self.options["index_heads"]
        dim = self.options["index_dim"]
        state = q.flatten(2)  # (b, n, width)
        width = state.shape[2]
        generator = torch.Generator(q.device).manual_seed(0)
        like = {"dtype": q.dtype, "device": q.device, "generator": generator}
        outputs = heads * dim, dim, heads
        mixed = state @ (width**-0.5 * torch.randn(width, sum(outputs), **like))
        index_q, index_k, weights = mixed.split(outputs, 2)
        return index_q.unflatten(2, (heads, dim)), index_k.unsqueeze(2), weights


class Native(Choosing):
    """NSA with constant gates of random numbers from 0 to 1.

    The check compares each of its three parts with the oracle, and the output and the
    gradients with their sum.
    """

    def __init__(self, point: Point, device):
        super().__init__(point, device)
        generator = torch.Generator(device).manual_seed(0)
        like = {"dtype": self.dtype, "device": device, "generator": generator}
        self.gates = torch.rand(*self.shapes()[0][:3], 3, **like)

    def other_pairs(self) -> int:
        at = torch.arange(1, self.point.seq_len + 1)
        seen = at // self.options["block_size"] + at.clamp(max=self.options["window"])
        return self.point.heads * int(seen.sum())

    def forward(self, q, k, v):
        return selection.nsa(q, k, v, self.gates, **self.options), None

    def check(self, inputs: list[Tensor], output: Output, starts=(None,)) -> Checked:
        if self.alone:
            return super().check(inputs, output, starts)
        qkv = [t.detach().requires_grad_(self.backward) for t in inputs[:3]]
        parts = selection.nsa_parts(*qkv, **self.options)
        window = sliding_window(tokens=self.options["window"])
        patterns = None, self.choose(*qkv[:2]), window
        total = {}
        each = []
        for part, pattern, gate in zip(parts, patterns, self.gates.unbind(3)):
            gate = gate.unsqueeze(3)  # (b, n, h, 1)
            dout = [gate * t for t in inputs[3:]]
            grads = torch.autograd.grad(part, qkv, *dout) if dout else ()
            result = Output(part.detach(), None, *grads)
            if pattern is None:
                right = compressed(*qkv, *dout, size=self.options["block_size"])
                each.append(errors_of(result, right, *qkv[:2], *dout))
            else:
                self.pattern = pattern
                each.append(System.check(self, [*qkv, *dout], result, starts)[0])
            for name, t in result.named().items():
                total[name] = total.get(name, 0) + (gate * t if name == "out" else t)
        each.append(errors_of(output, total, *inputs[:2], *inputs[3:]))
        errors = {name: max(x[name] for x in each) for name in total}
        return errors, {name: self.tolerance[name] for name in errors}


def compressed(q, k, v, *dout, size: int) -> dict[str, Tensor]:
    """Attention to the means of blocks that a query is not before the end of, and its
    gradients, in float64.
    """
    qkv = [t.detach().double().requires_grad_(bool(dout)) for t in (q, k, v)]
    count = q.shape[1] // size
    means = [t[:, : count * size].unflatten(1, (count, size)).mean(2) for t in qkv[1:]]
    seen = without_reach(lambda at, block, **_: size * (block + 1) <= at[:, None] + 1)
    out, _ = reference.attention(qkv[0], *means, seen)
    grads = torch.autograd.grad(out, qkv, dout[0].double()) if dout else ()
    return Output(out, None, *grads).named()


def errors_of(output: Output, right: dict[str, Tensor], q, k, *dout) -> dict:
    """The errors of an output and its gradients, all of them."""
    floors = [reference.gradient_floor(q, k, t) for t in dout]
    return {
        name: reference.error(t, right[name], *([1.0] if name == "out" else floors))
        for name, t in output.named().items()
    }

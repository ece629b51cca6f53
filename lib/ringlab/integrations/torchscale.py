"""torchscale's LongNet on ringlab's attention, without flash-attn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention import MASKS, REFUSED, attention
from ..checks import check_choice, check_unknown, short_repr
from ..nn import lengths_of
from ..patterns import Dilated

REASONS = {name: REFUSED["attn_mask"] for name in MASKS} | {
    "rel_pos": "a bias of the scores is not supported",
    "incremental_state": "generation is not supported",
}


class LongNetAttention(nn.Module):
    """What ``longnet`` makes of torchscale's ``DilatedAttention``: its arguments, its
    modules and its attributes.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state=None,
        key_padding_mask: Tensor | None = None,
        attn_mask=None,
        rel_pos=None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attention of query (b, n, embed_dim) to key and value, as torchscale returns
        it: (b, n, embed_dim) and None.
        """
        refused = {"incremental_state": incremental_state, "rel_pos": rel_pos}
        check_unknown("LongNet", refused | {"attn_mask": attn_mask}, REASONS)
        if self.training and self.dropout:
            raise NotImplementedError(
                f"attention dropout {self.dropout} is not supported in training: "
                "build the model with attention_dropout=0.0"
            )
        lengths = None
        if key_padding_mask is not None and key_padding_mask.any():
            if self.padding == "zeros":
                raise NotImplementedError(
                    "torchscale ignores key_padding_mask: leave it out, or take longnet(model, padding='none')"
                )
            lengths = lengths_of(key_padding_mask.bool(), query)
        b, n, _ = query.shape
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (t.unflatten(2, (self.num_heads, -1)) for t in projected)
        if self.xpos is not None:
            q, k = (
                self.xpos(t.transpose(1, 2).flatten(0, 1), downscale=down)
                .unflatten(0, (b, -1))
                .transpose(1, 2)
                for t, down in ((q, False), (k, True))
            )  # (b, n, h, d)
        options = {"causal": is_causal, "lengths": lengths}
        if self.padding == "zeros":
            zeros = zero_keys(self.pattern, n, self.num_heads)
            if not is_causal:  # zeros come last; m keys of score 0 are a sink log m
                options["sinks"] = zeros.log().to(q.device)
        out = attention(q, k, v, self.pattern, **options)  # (b, n, h, d)
        out = out.flatten(2)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return self.out_proj(out), None

    def extra_repr(self) -> str:
        return f"{self.pattern}, padding={self.padding}"


def longnet(model: nn.Module, *, padding: str = "zeros") -> nn.Module:
    """Let a LongNet of torchscale run on ``ringlab.attention``; returns the model.

    For models as the slide encoder of Prov-GigaPath, whose own attention needs
    flash-attn and fails without it (``assert flash_attn_func is not None``): this one
    runs wherever ``ringlab.attention`` does, on CPUs and older GPUs too. Each ``DilatedAttention`` in
    the model, or the model itself, is changed in place. Weights, state dict and hooks
    stay as they are.

    ``padding="zeros"`` gives the published model's outputs: torchscale pads the last
    segment of each branch with rows of zeros, which its queries attend to.
    ``padding="none"`` is the pattern alone, ``Dilated(..., offsets="block")``: outputs
    differ where a segment is not full. A later call changes the padding.

    Gradients are those of the outputs. torchscale's own differ from them, since it
    takes the weights that mix its branches as constants. ``key_padding_mask`` must hide
    the ends of sequences, and needs ``padding="none"``: torchscale ignores it.

    Raises ValueError for a model without such a layer, and NotImplementedError for
    ``seq_parallel``. A call raises TypeError for a mask of pairs, relative positions
    and generation, and NotImplementedError for attention dropout in training (it is off
    in evaluation) and, with padding, for sequences that are longer than a segment which
    its rate does not divide, since torchscale shifts their rows: those of Prov-GigaPath
    beyond 185,363 tiles. ``torch.compile`` breaks its graph at each layer, since what
    masks hide is looked at. MPS was not tried. An example::

        from gigapath import slide_encoder
        model = slide_encoder.create_model(weights, "gigapath_slide_enc12l768d", 1536)
        model = longnet(model.eval())
        embedding = model(tiles, coords)[-1]  # (b, n, 1536), (b, n, 2) to (b, 768)
    """
    check_choice("padding", padding, ("zeros", "none"))
    if not isinstance(model, nn.Module):
        raise TypeError(f"longnet takes a model, got {short_repr(model)}")
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, LongNetAttention) or hasattr(layer, "sparse_to_dense")
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no torchscale DilatedAttention")
    for layer in layers:
        kind = type(layer)
        if not (isinstance(layer, LongNetAttention) or "sparse_to_dense" in vars(kind)):
            raise NotImplementedError(
                f"{kind.__name__} is a subclass of DilatedAttention: call longnet before a model is wrapped"
            )
        if layer.args.seq_parallel:
            raise NotImplementedError("LongNet with seq_parallel=True is not supported")
        lengths = layer.args.segment_length
        rates = layer.args.dilated_ratio
        layer.pattern = Dilated(lengths, rates, offsets="block")
        layer.padding = padding
        if not isinstance(layer, LongNetAttention):  # or a class of FSDP on top of it
            layer.__class__ = LongNetAttention  # keeps hooks and references
    return model


def zero_keys(pattern: Dilated, n: int, heads: int) -> Tensor:
    """How many rows of torchscale's padding each query sees, (heads, n).

    It pads sequences to whole segments, and segments to multiples of the rate.

    >>> zero_keys(Dilated([4], [2], offsets="block"), 5, 2)
    tensor([[0., 0., 0., 0., 1.],
            [0., 0., 0., 0., 0.]], dtype=torch.float64)
    """
    counts = torch.zeros(heads, n, dtype=torch.float64)
    for branch in pattern.branches(n, heads):
        last = (n - 1) // branch.length * branch.length
        if last and branch.length % branch.rate:
            raise NotImplementedError(
                f"segments of {branch.length} at rate {branch.rate} shift torchscale's rows: take padding='none'"
            )
        for head, offset in zip(branch.heads, branch.offsets):
            rows = counts[head, last + offset :: branch.rate]
            rows += -(-branch.length // branch.rate) - len(rows)
    return counts

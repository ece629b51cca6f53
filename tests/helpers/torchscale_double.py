"""torchscale's LongNet encoder without flash-attn: its names, shapes, state dict and
arithmetic.

Rows are padded with zeros as there, and every score is formed. As in torchscale a
padded row is a key, the output of a segment that its rate does not divide shifts those
of later ones, and, with ``constant_weights``, no gradient flows through the weights
that mix the branches.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GIGAPATH = [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]


def settings(lengths=(8, 24), rates=(1, 2), **more) -> SimpleNamespace:
    """The part of torchscale's ``EncoderConfig`` that the encoder reads."""
    usual = {
        "encoder_embed_dim": 32,
        "encoder_attention_heads": 4,
        "encoder_ffn_embed_dim": 64,
        "encoder_layers": 2,
        "attention_dropout": 0.0,
        "subln": True,
        "layernorm_eps": 1e-5,
        "xpos_rel_pos": False,
        "xpos_scale_base": 512,
        "multiway": False,
        "flash_attention": True,
        "seq_parallel": False,
        "segment_length": list(lengths),
        "dilated_ratio": list(rates),
    }
    return SimpleNamespace(**usual | more)


class XPOS(nn.Module):
    """Rotary embedding of neighbouring columns, scaled by position."""

    def __init__(self, head_dim: int, scale_base: int):
        super().__init__()
        self.scale_base = scale_base
        columns = torch.arange(0, head_dim, 2)
        self.register_buffer("scale", (columns + 0.4 * head_dim) / (1.4 * head_dim))

    def forward(self, x: Tensor, offset: int = 0, downscale: bool = False) -> Tensor:
        n, half = x.shape[1], len(self.scale)
        place = torch.arange(n) - (n + 1) // 2  # torchscale: -n // 2 rounds down
        power = self.scale ** (place.to(x) / self.scale_base)[:, None]  # (n, d / 2)
        power = 1 / power if downscale else power
        rates = 1.0 / 10000 ** (torch.arange(half) / half)
        angle = (torch.arange(n).float()[:, None] * rates).to(x)
        cos, sin = angle.cos() * power, angle.sin() * power
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class DilatedAttention(nn.Module):
    constant_weights = False

    def __init__(self, args, embed_dim: int, num_heads: int):
        super().__init__()
        self.args, self.embed_dim, self.num_heads = args, embed_dim, num_heads
        self.dropout = args.attention_dropout
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim))
        norm = nn.LayerNorm(embed_dim, eps=args.layernorm_eps)
        self.inner_attn_ln = norm if args.subln else None
        turn = XPOS(embed_dim // num_heads, args.xpos_scale_base)
        self.xpos = turn if args.xpos_rel_pos else None

    def dense_to_sparse(self, x: Tensor, length: int, rate: int) -> Tensor:
        """(b, segments, rows, h, d): what each head selects of x (b, n, h, d)."""
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % length)).unflatten(1, (-1, length))
        x = F.pad(x, (0, 0, 0, 0, 0, -length % rate)).unflatten(2, (-1, rate))
        block = math.ceil(self.num_heads / rate)
        heads = [x[:, :, :, h // block, h] for h in range(self.num_heads)]
        return torch.stack(heads, 3)

    def sparse_to_dense(self, x: Tensor, n: int, rate: int, empty: float) -> Tensor:
        """(b, n, h, d) of x (b, segments, rows, h, d), ``empty`` where none selects."""
        block = math.ceil(self.num_heads / rate)
        chosen = F.one_hot(torch.arange(self.num_heads) // block, rate).T.bool()
        x = torch.where(
            chosen[..., None], x.unsqueeze(3), empty
        )  # (b, s, rows, r, h, d)
        return x.flatten(1, 3)[:, :n]

    def forward(
        self,
        query,
        key,
        value,
        incremental_state=None,
        key_padding_mask=None,
        attn_mask=None,
        rel_pos=None,
        is_first_step=False,
        is_causal=False,
    ):
        assert incremental_state is None and attn_mask is None and rel_pos is None
        n, split = query.shape[1], (self.num_heads, -1)
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (t.unflatten(2, split) for t in (q, k, v))  # (b, n, h, d)
        if self.xpos is not None:
            k, q = (
                self.xpos(t.transpose(1, 2).flatten(0, 1), downscale=down)
                .unflatten(0, (-1, self.num_heads))
                .transpose(1, 2)
                for t, down in ((k, True), (q, False))
            )
        outs, lses = [], []
        for length, rate in zip(self.args.segment_length, self.args.dilated_ratio):
            length = min(length, n)
            qs, ks, vs = (self.dense_to_sparse(t, length, rate) for t in (q, k, v))
            scores = torch.einsum("bsihd,bsjhd->bshij", qs, ks) * qs.shape[-1] ** -0.5
            if is_causal:
                rows = torch.arange(scores.shape[-1])
                scores = scores.masked_fill(rows > rows[:, None], -math.inf)
            lse = scores.logsumexp(-1, True)  # (b, s, h, rows, 1)
            out = torch.einsum("bshij,bsjhd->bsihd", (scores - lse).exp(), vs)
            outs.append(self.sparse_to_dense(out, n, rate, 0.0))
            lses.append(self.sparse_to_dense(lse.transpose(2, 3), n, rate, -1e8))
        weights = torch.stack(lses).softmax(0)  # (branches, b, n, h, 1)
        weights = weights.detach() if self.constant_weights else weights
        out = (torch.stack(outs) * weights).sum(0).flatten(2)
        out = out if self.inner_attn_ln is None else self.inner_attn_ln(out)
        return self.out_proj(out), None


class FeedForwardNetwork(nn.Module):
    def __init__(self, args):
        super().__init__()
        dims = args.encoder_embed_dim, args.encoder_ffn_embed_dim
        self.fc1, self.fc2 = nn.Linear(*dims), nn.Linear(*dims[::-1])
        self.ffn_layernorm = nn.LayerNorm(dims[1]) if args.subln else None

    def forward(self, x):
        x = F.gelu(self.fc1(x))
        return self.fc2(x if self.ffn_layernorm is None else self.ffn_layernorm(x))


class LongNetEncoderLayer(nn.Module):
    def __init__(self, args):
        super().__init__()
        dim = args.encoder_embed_dim
        self.self_attn = DilatedAttention(args, dim, args.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.ffn = FeedForwardNetwork(args)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x, encoder_padding_mask, attn_mask=None, rel_pos=None):
        y = self.self_attn_layer_norm(x)
        y, _ = self.self_attn(
            query=y,
            key=y,
            value=y,
            key_padding_mask=encoder_padding_mask,
            attn_mask=attn_mask,
            rel_pos=rel_pos,
            incremental_state=None,
        )
        x = x + y
        return x + self.ffn(self.final_layer_norm(x))


class LongNetEncoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        layers = (LongNetEncoderLayer(args) for _ in range(args.encoder_layers))
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(args.encoder_embed_dim)

    def forward(self, token_embeddings, encoder_padding_mask=None, **masks):
        x, mask = token_embeddings, encoder_padding_mask
        mask = torch.zeros(x.shape[:2], dtype=torch.bool) if mask is None else mask
        x = x * ~mask[..., None]
        for layer in self.layers:
            x = layer(x, mask, **masks)
        return {"encoder_out": self.layer_norm(x)}

"""A GPU that is not here: operators of torch and of other packages as CPU doubles with
the same contract, so that adapters, probes and choices run as they would there.
"""

from contextlib import contextmanager
from unittest import mock

import package_doubles
import torch
import torch_doubles
from ringlab import kernels, reference
from ringlab.kernels import DeviceSpec, triton

PACKAGES = {
    "xformers": ("xformers",),
    "flash_attn_2": ("flash_attn",),
    "flash_attn_3": ("flash_attn_3",),
    "flash_attn_4": ("flash_attn_4",),
}


class Lists(triton.TritonKernel):
    """The list kernels by the float64 reference: of whole patterns, heads unequal."""

    def refuses(self, device, dtype, head_dim):
        with mock.patch.object(triton, "interpreted", lambda: False):
            return super().refuses(device, dtype, head_dim)

    def attend(self, q, k, v, pattern, causal, scale, cached=None):
        out, lse = reference.attention(
            *(t.double() for t in (q, k, v)), pattern, causal=causal, scale=scale
        )
        return out.to(q.dtype), lse.float()

    def gradients(
        self, dout, dlse, q, k, v, out, lse, pattern, causal, scale, cached=None
    ):
        """Of the softmax that (out, lse) are of."""
        n, heads, group = q.shape[1], q.shape[2], q.shape[2] // k.shape[2]
        at = torch.arange(n)
        m = torch.stack(
            [
                pattern.multiplicity(
                    at, at, n=n, head=h, heads=heads, kv_heads=k.shape[2]
                )
                for h in range(heads)
            ]
        ).double()
        m = m.tril() if causal else m
        exact = [t.double().transpose(1, 2) for t in (q, k, v, dout, out)]
        q_, k_, v_, g, o = (t.repeat_interleave(heads // t.shape[1], 1) for t in exact)
        lse = lse.double().unsqueeze(-1)
        p = m * (scale * q_ @ k_.mT - lse.masked_fill(lse == -torch.inf, 0)).exp()
        total = (g * o).sum(-1, keepdim=True)
        if dlse is not None:
            total = total - dlse.double().unsqueeze(-1).nan_to_num(0.0)
        ds = scale * p * (g @ v_.mT - total)
        grads = ds @ k_, ds.mT @ q_, p.mT @ g
        grads = grads[0], *(t.unflatten(1, (-1, group)).sum(2) for t in grads[1:])
        return tuple(t.transpose(1, 2).to(q.dtype) for t in grads)


@contextmanager
def gpu(capability: tuple[int, int], *packages: str):
    """Inside, tensors count as on a GPU of this capability, with these kernels of other
    packages installed (names of ``kernels.KERNELS``).
    """
    modules = tuple(module for name in packages for module in PACKAGES[name])
    kernels.forget_probes()
    try:
        with (
            torch_doubles.registered(capability),
            package_doubles.installed(capability, modules),
            mock.patch.dict(kernels.KERNELS, triton=Lists()),
            kernels.pretend(DeviceSpec("cuda", capability)),
        ):
            yield
    finally:
        kernels.forget_probes()

"""A GPU that is not here: operators of torch and of other packages as CPU doubles with
the same contract, so that adapters, probes and choices run as they would there.
"""

from contextlib import contextmanager
from unittest import mock

import package_doubles
import torch_doubles
from matrix import differentiated
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
        out, lse = reference.attention(q, k, v, pattern, causal=causal, scale=scale)
        return out.to(q.dtype), lse.float()

    def gradients(
        self, dout, dlse, q, k, v, out, lse, pattern, causal, scale, cached=None
    ):
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        found = reference.attention(*leaves, pattern, causal=causal, scale=scale)
        grads = list(differentiated(*found, leaves, dout, dlse).values())[2:]
        return tuple(grad.to(q.dtype) for grad in grads)


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

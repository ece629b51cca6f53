"""Every kind of call that has a gradient, on one device or over a group: importable by
name, so that other processes find it.
"""

from functools import partial

import torch
import torch.distributed as dist
from ringlab import Adaptive, Dilated, Selected, adaptive_attention, attention, blocks
from ringlab.ring import SCHEMES

ONES = torch.ones(1, 4, 2, 8, dtype=torch.float64)  # the rows of a rank
LISTS = Selected(torch.zeros(1, 1, 4, 1, dtype=torch.long), window=2)


def calls(group) -> list:
    """Functions of q, k, v (1, 4, 2, 8) that give out and lse."""
    own = [
        {"sinks": ONES[0, 0, :, 0]},
        {"softcap": 0.01},
        {"lengths": [3]},
        {"pattern": Dilated([2, 4], [1, 2])},
        {"pattern": blocks.sliding_window(tokens=2)},
        {"pattern": LISTS},
    ]
    if group is not None:
        own += [{"scheme": scheme} for scheme in SCHEMES]
    how = {"causal": True, "return_lse": True, "group": group}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    z = ONES.new_zeros(1, 2, 2, 2 * ranks)
    return [
        *(partial(attention, **{"pattern": "dense"} | how | each) for each in own),
        *(
            partial(adaptive_attention, pattern=Adaptive(2, 1), z=x, **how)
            for x in (None, z)
        ),
    ]


def said(call, *args, **options) -> str:
    """The text of the error that a call ends with; "" for none."""
    try:
        call(*args, **options)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return ""


def refusals(*group) -> list[tuple[str, str]]:
    """What should be said and is, of every call, for a second derivative of out and of
    lse, by a tensor whose gradient was not asked for, and for batched gradients.
    """
    found = []
    for call in calls(*group or [dist.group.WORLD]):
        q, k, v = (ONES.clone().requires_grad_() for _ in range(3))
        for y in call(q, k, v):
            (dk,) = torch.autograd.grad(y.sum(), k, create_graph=True)
            found.append(("differentiable once", said((dk.sum() + q.sum()).backward)))
            batch = y.detach().expand(2, *y.shape)
            how = {"is_grads_batched": True, "retain_graph": True}
            found.append(("batched", said(torch.autograd.grad, y, q, batch, **how)))
    return found

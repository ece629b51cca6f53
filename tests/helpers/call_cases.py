"""Every kind of call that has a gradient, on one device or over a group: importable by
name, so that other processes find it.
"""

from functools import partial

import torch
import torch.distributed as dist
from ringlab import (
    Adaptive,
    Dilated,
    Selected,
    adaptive_attention,
    attention,
    blocks,
)
from ringlab.ring import SCHEMES

ONES = torch.ones(1, 4, 2, 8, dtype=torch.float64)  # the rows of a rank
LISTS = Selected(torch.zeros(1, 1, 4, 1, dtype=torch.long), window=2)


def calls(group=None) -> dict:
    """Functions of q, k, v (1, 4, 2, 8) that give out and lse, by name."""
    how = {"causal": True, "return_lse": True, "group": group}
    whole = {"pattern": "dense"}
    options = {
        "dense": whole,
        "sinks": whole | {"sinks": ONES[0, 0, :, 0].clone().requires_grad_()},
        "softcap": whole | {"softcap": 0.01},
        "documents": whole | {"lengths": [3]},
        "dilated": {"pattern": Dilated([2, 4], [1, 2])},
        "window": {"pattern": blocks.sliding_window(tokens=2)},
        "selected": {"pattern": LISTS},
    }
    if group is not None:
        options |= {name: whole | {"scheme": name} for name in SCHEMES}
    found = {name: partial(attention, **how, **each) for name, each in options.items()}
    every = 2 * dist.get_world_size() if dist.is_initialized() else 2  # blocks
    z = torch.zeros(1, 2, 2, every, dtype=torch.float64, requires_grad=True)
    return found | {
        "content": partial(adaptive_attention, pattern=Adaptive(2, 1), **how),
        "weights": partial(adaptive_attention, pattern=Adaptive(2, 1), z=z, **how),
    }


def said(call, *args, **options) -> str:
    """The name and text of the error that a call ends with; "" for none."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(group=None) -> dict:
    """By kind of call, what is said of a second derivative of out and of lse, by a
    tensor whose gradient was not asked for, and of batched gradients.
    """
    found = {}
    for name, call in calls(group).items():
        q, k, v = (ONES.clone().requires_grad_() for _ in range(3))
        for what, y in zip(("out", "lse"), call(q, k, v)):
            (dk,) = torch.autograd.grad(y.sum(), k, create_graph=True)
            loss = dk.sum() + q.sum()
            batched = {"is_grads_batched": True, "retain_graph": True}
            twos = y.detach().expand(2, *y.shape)
            found[name, what] = [
                said(loss.backward),
                said(torch.autograd.grad, y, q, twos, **batched),
            ]
    return found


def refusals_of_ranks() -> dict:
    return refusals(dist.group.WORLD)

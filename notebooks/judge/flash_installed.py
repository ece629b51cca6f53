"""Imported, this puts the doubles of flash-attn 2 and of torch's flash attention on a GPU in
place for the whole process, and the version for those who ask.
"""

import importlib.metadata
from unittest import mock

import flash_doubles
import torch

look_up = importlib.metadata.version


def version(name: str) -> str:
    return "2.8.3" if name in ("flash_attn", "flash-attn") else look_up(name)


placed = flash_doubles.placed(flash_doubles.flash_attn_2())
placed.__enter__()
importlib.metadata.version = version
mock.patch("torch.cuda.get_device_capability", lambda *_: (8, 0)).start()
library = torch.library.Library("aten", "IMPL")
for double in (flash_doubles.sdp_forward, flash_doubles.sdp_backward):
    library.impl(flash_doubles.NAMES[double], double, "CPU")

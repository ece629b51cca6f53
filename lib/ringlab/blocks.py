"""The block-sparse patterns, as ``from ringlab.blocks import sliding_window``."""

from .block_patterns import *  # noqa: F403

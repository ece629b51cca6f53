"""The block-sparse patterns, as ``from ringlab.blocks import sliding_window``."""

from .block_patterns import *  # noqa: F403
from .block_patterns import __all__ as __all__
from .block_patterns import __dir__ as __dir__

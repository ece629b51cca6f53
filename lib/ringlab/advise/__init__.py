"""Advice: which settings for which length on which hardware, and ``config="auto"`` of the modules."""

from .advice import Advice
from .advising import advise
from .auto import Auto
from .proposing import ladder, local
from .records import Choice, Evidence, Proposal

__all__ = ["Advice", "Auto", "Choice", "Evidence", "Proposal", "advise", "ladder", "local"]

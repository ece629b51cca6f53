"""Advice: which settings for which length on which hardware, and ``config="auto"`` of the modules."""

from .choose import Auto, advise, ladder, local
from .render import Advice, Choice, Evidence, Proposal

__all__ = ["Advice", "Auto", "Choice", "Evidence", "Proposal", "advise", "ladder", "local"]

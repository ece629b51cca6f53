"""Colours of figures, and how a figure's SVG follows the reader's light or dark scheme.

Series colours are seaborn's colour-blind-safe set, with a grey and a sky blue that stand out from white more than its
own. matplotlib draws with the light ones on white; the page swaps them for variables, so that one file serves light,
dark and print. Elsewhere, in JupyterLab or in a stock nbconvert page, a figure stays as it was drawn.
"""

from __future__ import annotations

import re

# name: (light, dark)
COLORS = {
    "ink": ("#33373d", "#d5d9de"),
    "faint": ("#d4d7db", "#3c434c"),
    "blue": ("#0173b2", "#3a8fd0"),
    "orange": ("#de8f05", "#f0a832"),
    "green": ("#029e73", "#2cc295"),
    "red": ("#d55e00", "#f5894a"),
    "purple": ("#cc78bc", "#dd98cf"),
    "grey": ("#767d85", "#8b939b"),
    "sky": ("#3a96cc", "#8fd0f5"),
    "mark": ("#fdfdfd", "#14171a"),  # the inside of a mark that stands on a bar
}
INK, FAINT, GREY, SKY, MARK = (COLORS[name][0] for name in ("ink", "faint", "grey", "sky", "mark"))
PAPER = "#fefefe"  # the background, which a page of ours leaves out


def themed(svg: str) -> str:
    """matplotlib's SVG with colours that follow the reader's scheme, and without what only matplotlib needs."""
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = svg.replace(PAPER, "none").replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{name})")
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in COLORS.items()) for i in (0, 1))
    style = f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    return re.sub(r"(<svg [^>]*>)", rf"\1{style}", svg, count=1).strip() + "\n"

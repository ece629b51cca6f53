"""Colours of figures, and how a figure's SVG stands in a page and follows the reader's
light or dark scheme.

Series colours are seaborn's colour-blind-safe set, with a grey and a sky blue that
stand out from white more than its own. matplotlib draws with the light ones on white; a
page swaps them for variables, so that one file serves light, dark and print. Elsewhere,
in JupyterLab or in a stock nbconvert page, a figure stays as it was drawn.
"""

import hashlib
import re
from html import escape

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
    "navy": ("#1f3f77", "#7f9fe0"),
    "plum": ("#7b3f86", "#b98ac6"),
    "olive": ("#6b8e00", "#a9c94a"),
    "brown": ("#8c5a2b", "#c49a6c"),
    "teal": ("#0a7a80", "#45b8bd"),
    "gold": ("#9a7d00", "#d8bd3f"),
}
INK, FAINT, BLUE, ORANGE, GREEN, RED, PURPLE, GREY, SKY, *MORE = (
    light for light, _ in COLORS.values()
)
NAVY, PLUM, OLIVE, BROWN, TEAL, GOLD = MORE
SERIES = GREY, INK, BLUE, ORANGE, GREEN, SKY, PURPLE, RED, *MORE
# A pattern has one color on all pages: greys are dense, blues windows, purples LongNet,
# greens other blocks; warm ones choose their keys by content.
PATTERNS = {
    "Dense": GREY,
    "As advised": NAVY,
    "Dense SDPA": GREY,
    "Best dense kernel": GREY,
    "Dense, ours": INK,
    "Sliding window": SKY,
    "Window": BLUE,
    "Window of 2,048": BLUE,
    "Window, first layer dense": NAVY,
    "Window, last layer dense": SKY,
    "LongNet": PURPLE,
    "LongNet from 256": PLUM,
    "LongNet from 2,048": PURPLE,
    "LongNet and window": PLUM,
    "BigBird": GREEN,
    "Local and global": OLIVE,
    "FlexAttention": TEAL,
    "Hierarchical": TEAL,
    "Adaptive": GOLD,
    "MoBA": ORANGE,
    "NSA": RED,
    "DSA": BROWN,
    "Vertical and slash": GOLD,
}
LIGHT, DARK = (
    "; ".join(f"--fig-{name}: {pair[i]}" for name, pair in COLORS.items())
    for i in (0, 1)
)
PAPER = "#fefefe"  # the background, which a page of ours leaves out


def css() -> str:
    """The style that figures need once in a page: their colours in both schemes, and
    matplotlib's line ends.
    """
    return (
        f"figure svg {{ {LIGHT}; }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ figure svg {{ {DARK}; }} }}\n"
        "figure svg * { stroke-linejoin: round; stroke-linecap: butt; }\n"
    )


def inline(svg: str, alt: str) -> str:
    """matplotlib's SVG as an image within a page, read aloud as ``alt``; its text can
    be searched and selected.

    Colours become those of ``css``. Names within the SVG become its own, because a page
    has several figures.
    """
    own = f"f{hashlib.sha256(svg.encode()).hexdigest()[:8]}"
    svg = re.sub(
        r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<(metadata|style)\b.*?</\1>",
        "",
        svg,
        flags=re.S,
    )
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(
        r' id="([^"]*)"', lambda m: f' id="{own}-{m[1]}"' if m[1] in used else "", svg
    )
    svg = re.sub(r'(url\(|href=")#', rf"\1#{own}-", svg)
    svg = svg.replace(PAPER, "none").replace(
        "'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif"
    )
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--fig-{name})")
    return (
        re.sub(r"\s*\n\s*", "\n", svg)
        .strip()
        .replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" ', 1)
    )

"""The size of Python source, in tokens."""

import io
import tokenize

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
F_START = getattr(tokenize, "FSTRING_START", None)  # from Python 3.12 on
F_END = getattr(tokenize, "FSTRING_END", None)


def size_of(source: str) -> tuple[int, int]:
    """(tokens, code lines) without comments and docstrings; an f-string is one token."""
    tokens, lines, inside, before = 0, set(), 0, None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        inside -= token.type == F_END
        if inside or token.type == F_END:
            inside += token.type == F_START
            continue
        inside += token.type == F_START
        if token.type in LAYOUT:
            if token.type not in (tokenize.NL, tokenize.COMMENT):
                before = token
            continue
        starts = before is None or before.type in LAYOUT
        before = token
        if token.type != tokenize.STRING or not starts:  # no docstring
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return tokens, len(lines)

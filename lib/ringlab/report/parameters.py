"""The parameters of a notebook. papermill hands them over as text: with ``-r`` always,
with ``-p`` where a word is neither a number nor True, False or None.
"""

from ast import literal_eval
from contextlib import suppress

WORDS = {"yes": "True", "no": "False"}


def read_parameters(names: dict) -> None:
    """Give each parameter of a notebook the type that its cell of parameters states;
    ``names`` are the notebook's ``globals()``.

    "no" and "false" are False, "8" is 8. Raises ValueError for what is no value of the
    type.

    >>> names = {"measure": "no", "heads": "8", "__annotations__": {"measure": bool, "heads": int}}
    >>> read_parameters(names)
    >>> names["measure"], names["heads"]
    (False, 8)
    """
    for name, kind in names["__annotations__"].items():
        value = names[name]
        if kind is not str and isinstance(value, str):
            with suppress(ValueError, SyntaxError):
                value = literal_eval(WORDS.get(value.lower(), value.capitalize()))
        if kind in (str, float) and type(value) is int:
            value = kind(value)
        if type(value) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")
        names[name] = value

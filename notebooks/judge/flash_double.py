"""Imported, this puts the double of flash-attn 2 in place for the whole process, and for
those who ask which version is installed.
"""

import importlib.metadata

import package_doubles

look_up = importlib.metadata.version


def version(name: str) -> str:
    return "2.8.3" if name in ("flash_attn", "flash-attn") else look_up(name)


installed = package_doubles.installed((8, 0), ("flash_attn",))
installed.__enter__()
importlib.metadata.version = version

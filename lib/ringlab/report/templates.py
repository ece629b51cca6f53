"""The templates of pages, of the index and of the sentences that stand in them."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from ..cost import format_bytes, format_seconds

TEMPLATES = Path(__file__).parent / "templates"
ENVIRONMENT = Environment(
    loader=FileSystemLoader([TEMPLATES / "text", *TEMPLATES.glob("*/report")]),
    autoescape=select_autoescape(["html.j2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {"bytes": format_bytes, "seconds": format_seconds}


def rendered(template: str, **values) -> str:
    """The text of a template, without what is empty around it."""
    return ENVIRONMENT.get_template(f"{template}.j2").render(values).strip()


def lines_of(template: str, **values) -> list[str]:
    """The lines of a template that are not empty."""
    return [x for x in rendered(template, **values).split("\n") if x]

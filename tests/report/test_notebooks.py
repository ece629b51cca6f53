"""Report notebooks are whole: short cells, short functions, words that the library
documents.
"""

import ast
import json
import re
from importlib import import_module

import pytest
from reporting import ROOT
from ringlab import report
from ringlab.report import driver, render

LINES = 45  # of a cell, as the formatter lays it out
FUNCTION = 10  # lines of a function, without its docstring


def cells_of(name: str) -> list[tuple[str, list[str]]]:
    """(source, tags) of the code cells."""
    cells = json.loads(driver.notebook_of(name).read_text())["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    return [("".join(c["source"]), c["metadata"].get("tags", [])) for c in code]


@pytest.mark.parametrize("name", driver.REPORTS)
def test_cells_and_functions_are_short(name):
    for source, _ in cells_of(name):
        assert source.count("\n") < LINES, source
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[bool(ast.get_docstring(node))]
                lines = node.end_lineno - first.lineno + 1
                assert lines <= FUNCTION, node.name


@pytest.mark.parametrize("name", [x for x in driver.REPORTS if x != "quality"])
def test_a_page_has_parameters_points_and_known_words(name):
    cells = cells_of(name)
    tags = [tag for _, tags in cells for tag in tags if tag != render.MEASURED]
    assert tags == ["parameters", "points"] and "profile: str" in cells[0][0]
    source = "\n".join(text for text, _ in cells)
    used = set(re.findall(r"(?<!ringlab\.)\breport\.(\w+)", source))
    assert used <= set(report.VOCABULARY), (
        "what a page calls is documented in one place"
    )


def test_the_vocabulary_is_there_and_documented():
    for name, module in report.VOCABULARY.items():
        found = getattr(report, name)
        assert found.__doc__, name
        assert found is getattr(import_module(f"ringlab.{module}"), name)
    assert dir(report) == sorted(report.VOCABULARY)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        report.nothing  # noqa: B018


def test_no_module_stands_beside_a_notebook_but_for_the_trainings():
    modules = {p.relative_to(ROOT).parts[1] for p in (ROOT / "notebooks").rglob("*.py")}
    assert modules == {"quality", "tutorials"}

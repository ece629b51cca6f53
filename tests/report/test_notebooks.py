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
FOLDER = ROOT / "notebooks"
NOTEBOOKS = [*FOLDER.glob("*.ipynb"), *FOLDER.glob("[!.]*/*.ipynb")]
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_reads_its_parameters_first(path):
    cells = json.loads(path.read_text())["cells"]
    first, then = [c for c in cells if c["cell_type"] == "code"][:2]
    assert first["metadata"]["tags"] == ["parameters"]
    assert "read_parameters(globals())" in "".join(then["source"])
    names: dict = {}
    exec("".join(first["source"]), names)
    texts = names | {x: str(names[x]) for x in names["__annotations__"]}
    report.read_parameters(texts)
    assert texts == names


@pytest.mark.parametrize(
    "value, read",
    [
        ("False", False),
        ("no", False),
        ("Yes", True),
        ("8", 8),
        ("0.5", 0.5),
        (1, 1.0),
        ("[1024, 4096]", [1024, 4096]),
        (8192, "8192"),
    ],
)
def test_a_parameter_as_text_is_understood(value, read):
    names = {"x": value, "__annotations__": {"x": type(read)}}
    report.read_parameters(names)
    assert names["x"] == read and type(names["x"]) is type(read)


@pytest.mark.parametrize(
    "kind, value",
    [(bool, "perhaps"), (bool, ""), (bool, 0), (int, True), (list, "1"), (str, None)],
)
def test_a_parameter_of_the_wrong_type_is_one_line(kind, value):
    names = {"x": value, "__annotations__": {"x": kind}}
    with pytest.raises(ValueError, match=f"^x must be {kind.__name__}, got "):
        report.read_parameters(names)


def test_the_vocabulary_is_there_and_documented():
    for name, module in report.VOCABULARY.items():
        found = getattr(report, name)
        assert found.__doc__, name
        assert found is getattr(import_module(f"ringlab.{module}"), name)
    assert dir(report) == sorted(report.VOCABULARY)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        report.nothing  # noqa: B018


def test_no_module_stands_beside_a_notebook_but_for_trainings_and_the_judge():
    modules = {p.relative_to(ROOT).parts[1] for p in (ROOT / "notebooks").rglob("*.py")}
    assert modules == {"judge", "quality", "tutorials"}

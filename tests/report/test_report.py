"""Document 000 from made-up rows: what its pages say, and what they refuse to say."""

import re

import pytest
from bs4 import BeautifulSoup
from reporting import CPU, NOTEBOOK, made, run_in_this_process, write_rows
from ringlab import measure
from ringlab.report import driver, places, render

# page: the least number of its figures
PAGES = {
    "cpu/optimization_results": 1,
    "gtx1080/optimization_results": 1,
    "cpu/landscape": 1,
    "cpu/claims": 0,
    "index": 0,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A folder with all cpu reports, from made-up rows of the optimization suite, and
    one of a GPU that is absent.
    """
    folder = tmp_path_factory.mktemp("reports")
    write_rows(folder / "cpu" / "data", made("000"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "run", lambda *a, **k: [])
        patch.setenv(places.NO_MEASURING, "1")  # as in the kernels of the driver
        patch.setattr(
            render,
            "execute",
            lambda source, given, *_, **__: run_in_this_process(source, None, given),
        )
        patch.chdir(folder)
        some = [NOTEBOOK, driver.notebook_of("claims")]
        driver.run("gtx1080", reports=folder, notebooks=some, machine=CPU)
        driver.run("cpu", reports=folder, machine=CPU)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_page_is_one_offline_file_with_alt_text(reports, page):
    text = (reports / f"{page}.html").read_text()
    found = BeautifulSoup(text, "html.parser")
    fetched = r"""@import|url\((?!#)|src=["']?(https?:|//)"""
    assert not re.search(fetched, text)
    assert not found(["script", "link", "iframe", "object", "embed", "video", "audio"])
    assert not found("img") and len(found("svg")) == len(found("figure")) >= PAGES[page]
    for figure in found("figure"):
        assert (
            figure.svg["role"] == "img"
            and len(figure.svg["aria-label"]) > 40
            and figure.figcaption.text.strip()
        )
        assert figure.svg("text"), "text that a reader can search"
        assert page == "index" or figure.find_next_sibling().name == "details", (
            "the data under each figure"
        )
    assert (
        len(found("h1")) == len(found("title")) == len(found("main")) == 1
        and found.h1.text == found.title.text
    )
    levels = [int(heading.name[1]) for heading in found(re.compile("^h[1-6]$"))]
    assert all(deeper <= level + 1 for level, deeper in zip(levels, levels[1:]))
    ids = [tag["id"] for tag in found(id=True)]
    assert len(ids) == len(set(ids)) and {*re.findall(r"url\(#([^)]+)", text)} <= {*ids}
    assert (
        "prefers-color-scheme: dark" in text
        and "@media print" in text
        and found(attrs={"name": "viewport"})
    )


@pytest.mark.parametrize("page", PAGES)
def test_markdown_has_no_html_and_its_figures(reports, page):
    path = reports / f"{page}.md"
    text = path.read_text()
    assert not re.search(
        r"</?[a-zA-Z][^>]*>", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)
    )
    figures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(figures) >= PAGES[page]
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert (
            len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()})
            == 1
        )

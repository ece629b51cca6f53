"""What reports are made of: tables, figures, pages, the index, and what a request for a
profile comes to.
"""

import io
import json
import re

import nbformat
import pandas
import pytest
import seaborn
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter, MarkdownExporter
from reporting import CPU, figure, notebook, run_in_this_process, write_two_rows
from ringlab import hardware
from ringlab.report import driver, figures, index, render, tables, theme


def svg_of(fig) -> str:
    out = io.StringIO()
    with figures.drawing():
        fig.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


LINES = pandas.DataFrame(
    [
        ("a", 1024, 1.0, 0.9, 1.1),
        ("a", 2048, 2.0, 1.9, 2.1),
        ("b", 1024, 3.0, None, None),
    ],
    columns=["variant", "seq_len", "y", "low", "high"],
)
COLORS = {"a": theme.BLUE, "b": theme.ORANGE}


@pytest.mark.parametrize(
    "draw",
    [
        lambda: figures.lines(
            {"Time (ms)": LINES}, xlabel="Tokens", colors=COLORS, dashed=["b"]
        ),
        lambda: figures.lines(
            {"Times": LINES[:1]}, xlabel="Tokens", colors=COLORS, linear=True
        ),
    ],
)
def test_figures_are_the_same_every_time_and_follow_the_scheme(draw):
    with figures.plt.rc_context({"font.size": 30}):  # a user's own settings
        svg = svg_of(draw())
    figures.plt.close("all")
    assert svg_of(draw()) == svg
    figures.plt.close("all")
    shown = theme.inline(svg, 'a "figure"')
    assert not [
        color
        for color in (*(pair[0] for pair in theme.COLORS.values()), theme.PAPER)
        if color in shown
    ]
    image = BeautifulSoup(shown, "html.parser").svg
    assert (image["role"], image["aria-label"]) == ("img", 'a "figure"') and image(
        "text"
    )
    for name in set(re.findall(r"var\((--.*?)\)", shown)):
        light, dark = theme.css().split(
            "@media screen and (prefers-color-scheme: dark)"
        )
        assert all(
            f"{name}: {theme.COLORS[name[6:]][i]}" in style
            for i, style in enumerate((light, dark))
        )


def test_figures_of_a_page_share_no_names():
    """A clip path is found by its name, and the first one of a page would serve all
    figures.
    """
    found = []
    for size in (1.0, 2.0):
        frame = LINES.assign(y=size * LINES.y)
        fig = figures.lines({"Time (ms)": frame}, xlabel="Tokens", colors=COLORS)
        found.append(theme.inline(svg_of(fig), "a"))
        figures.plt.close(fig)
    names = [set(re.findall(r' id="([^"]+)"', svg)) for svg in found]
    used = [set(re.findall(r'(?:url\(|href=")#([^")]+)', svg)) for svg in found]
    assert names == used and names[0] and not names[0] & names[1]


def test_colours_are_seaborns():
    safe = seaborn.color_palette("colorblind").as_hex()[:5]
    assert [
        theme.COLORS[n][0] for n in ("blue", "orange", "green", "red", "purple")
    ] == safe


@pytest.mark.parametrize(
    "make, said",
    [
        (
            lambda: figures.show(None, "x", "caption", " ", tables.Table("t", ["a"])),
            "needs alt text",
        ),
        (lambda: tables.Table("t", ["a", "b"], [[1]]), "has 2 columns, a row has 1"),
    ],
    ids=["no alt text", "a ragged row"],
)
def test_what_cannot_be_shown_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_html_and_markdown_are_escaped():
    table = tables.Table("<b>", ["a"], [["<script>|"]])
    assert "<script>" not in table.html and "\\<script>\\|" in table.markdown


def test_a_table_names_its_rows_aligns_numbers_and_wraps_text():
    row = ["a", 1234, "needs a device that is not here"]
    table = tables.Table("t", ["Name", ">Time (ms)", "Why"], [row])
    assert '<th scope="row">a</th><td class="n">1,234</td>' in table.html
    assert '<td class="w">needs' in table.html and "<td>" not in table.html
    assert "\n| a | 1,234 | needs a device that is not here |" in table.markdown
    empty = tables.Table("t", ["Name"])
    assert not empty.html.strip() and not empty.markdown


def test_a_heading_with_nothing_under_it_is_left_out():
    text = ["# Title\n\nText.", "## Empty", "## Kept", "Text.", "## Last"]
    cells = [*map(nbformat.v4.new_markdown_cell, text)]
    cells.insert(2, nbformat.v4.new_code_cell())
    assert render.filled(cells) == [cells[i] for i in (0, 2, 3, 4)]


@pytest.fixture
def executed(tmp_path):
    source = notebook(
        tmp_path / "page.ipynb",
        figure(1, "name"),
        "tables.Table('Shown', ['a', '>b'], [['x', 2]])",
    )
    return run_in_this_process(source, None, {})


def test_stock_nbconvert_shows_tables_figures_and_their_description(executed):
    text, _ = MarkdownExporter().from_notebook_node(executed)
    assert "| x | 2 |" in text and "Alt text." in text and "<div" not in text
    html, _ = HTMLExporter().from_notebook_node(executed)
    assert (
        "<td>x</td>" in html.replace(' style="text-align:left"', "")
        and "Alt text." in html
    )
    assert "image/svg+xml" in html or "<svg" in html


def test_our_pages_show_each_thing_once(executed, tmp_path):
    page = render.Page("page", "here", made="Made now.")
    written = render.render(executed, page, tmp_path)
    assert [p.name for p in written] == ["page.html", "page.md", "name.png"]
    html, text = (
        (tmp_path / "page.html").read_text(),
        (tmp_path / "page.md").read_text(),
    )
    assert html.count("Alt text.") == 1 and text.count("Alt text.") == 1
    assert html.count("A caption.") == 1 and text.count("A caption.") == 1
    assert (
        "![Alt text.](figures/name.png)" in text
        and "Made now." in text
        and "Made now." in html
    )
    assert 'profile: str = "cpu"' not in html + text


def test_a_computed_page_has_its_note_and_no_cell_that_needs_measurements(
    executed, tmp_path
):
    said = nbformat.v4.new_markdown_cell("## Times")
    said.metadata["tags"] = [render.MEASURED]
    executed.cells.insert(1, said)
    for computed in (False, True):
        page = render.Page("page", note="**Computed** by `it`.", computed=computed)
        render.render(executed, page, tmp_path)
        found = BeautifulSoup((tmp_path / "page.html").read_text(), "html.parser")
        (note,) = found.select(".banner")
        assert note.text == "Computed by it." and note.strong and note.code
        assert ("origin" in note["class"]) != computed
        texts = [
            found.nav.text if found.nav else "",
            (tmp_path / "page.md").read_text(),
        ]
        assert ["Times" in text for text in texts] == [not computed] * 2
        assert ("samples.jsonl" in texts[1]) != computed


def manifest(**more) -> dict:
    report = {"name": "page", "title": "A page", "finding": ["It **is** fast."], **more}
    about = {
        "profile": "x",
        "device": "a CPU",
        "measured": "2026-01-02T03:04:05Z",
        "commit": "0123456789abcdef",
    }
    return {**about, "dirty": True, "torch": "2.13.0", "reports": [report]}


def test_index_tells_whole_failed_unfinished_and_corrupt_apart(tmp_path, capsys):
    index.write_manifest(tmp_path / "cpu", manifest(), complete=True)
    for ending in ("html", "md"):
        render.write(tmp_path / "cpu" / f"page.{ending}", "a page")
    index.write_manifest(
        tmp_path / "b", manifest() | {"computed": True}, complete=False
    )
    index.write_manifest(
        tmp_path / "failed",
        manifest(failed="page.ipynb: code cell 2 raised | <b>"),
        complete=False,
    )
    write_two_rows(tmp_path, "measured")
    for name, text in {
        "cut": '{"reports": [',
        "list": "[]",
        "odd": '{"reports": [1]}',
        "binary": "\udc80",
    }.items():
        path = tmp_path / name / "data" / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "nothing").mkdir()
    index.write_index(tmp_path)
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 4 and all(
        "manifest.json cannot be read" in note for note in notes
    )

    text = (tmp_path / "index.md").read_text()
    sections = {s.splitlines()[0]: s for s in text.split("## ")[1:]}
    folders = "cpu binary cut failed list measured odd b".split()
    assert [*sections] == [*folders, "How to read the tables"]
    assert "unfinished" in sections["b"]
    assert (
        "| [A page](cpu/page.md) | It is fast. | [HTML](cpu/page.html)"
        in sections["cpu"]
    )
    assert (
        "a CPU · measured 2026-01-02 03:04 UTC · commit 0123456789 + changes"
        in sections["cpu"]
    )
    assert "unfinished" not in sections["cpu"]
    assert "**failed: page.ipynb: code cell 2 raised \\| \\<b>**" in sections["failed"]
    assert (
        "no report yet" in sections["measured"]
        and "(measured/data/samples.jsonl)" in sections["measured"]
    )
    assert all(
        "cannot be read" in sections[name] for name in ("cut", "list", "odd", "binary")
    )
    html = (tmp_path / "index.html").read_text()
    page = BeautifulSoup(html, "html.parser")
    links = [a["href"] for a in page("a")]
    inside = {x[1:] for x in links if x.startswith("#")}
    assert inside == {p.name for p in tmp_path.iterdir() if p.is_dir()} - {"nothing"}
    assert all(page.find(id=name) for name in inside)
    links = [x for x in links if not x.startswith("#")]
    assert "cpu/page.html" in links and all(
        (tmp_path / link).is_file() for link in links
    )
    assert "<b>" not in html
    before = (tmp_path / "index.html").stat().st_mtime_ns
    index.write_index(tmp_path)
    assert (tmp_path / "index.html").stat().st_mtime_ns == before
    assert (
        json.loads((tmp_path / "cpu" / "data" / "manifest.json").read_text())[
            "complete"
        ]
        is True
    )


def test_the_index_links_the_explorer_where_it_is(tmp_path):
    (tmp_path / "reports").mkdir()
    for there in (False, True):
        if there:
            render.write(tmp_path / "notebooks" / "explore.ipynb", "a notebook")
        pages = [p.read_text() for p in index.write_index(tmp_path / "reports")]
        assert all(
            ("../notebooks/explore.ipynb" in text) == there and "explore.ipynb" in text
            for text in pages
        )


def test_plan(tmp_path):
    def planned(name, machine, data=""):
        p = driver.run_target(name, machine, tmp_path, data)
        assert bool(p.why) == (name == "gtx1080" and machine is CPU)
        return p.data, p.computed

    def at(name: str, computed: bool = False) -> tuple:
        return tmp_path / name / "data", computed

    gpu = hardware.Gpu(
        "NVIDIA GeForce GTX 1080", (6, 1), 8_510_000_000, driver="580.65"
    )
    build = {"torch": "2.13.0+cu126", "torch_cuda": "12.6", "arch_list": ("sm_60",)}
    on_card = hardware.Machine(device="cuda", gpus=(gpu,), **build)
    assert planned("auto", CPU) == at("cpu")
    assert planned("gtx1080", CPU) == at("gtx1080", True)
    assert planned("auto", on_card) == at("gtx1080")
    assert planned("cpu", on_card) == at("cpu")
    write_two_rows(tmp_path, "gtx1080")
    assert planned("gtx1080", CPU) == at("gtx1080")
    assert planned("gtx1080", CPU, tmp_path) == (tmp_path, True)

"""The committed pages: every link and picture is there, nothing is without content; and
what answers the next steps of the five documents.
"""

import re
from html import unescape
from pathlib import Path

import pytest
from reporting import ROOT, Shown, shown, study_of
from ringlab import cli, patterns, report
from ringlab.advise import rounded
from ringlab.report import explore, render
from ringlab.report.places import read_manifest
from ringlab.report.published import DOCUMENTS

REPORTS = ROOT / "reports"
PAGES = [x for x in REPORTS.rglob("*") if x.suffix in (".html", ".md")]
# A table without rows, a heading with nothing under it, sentences without a number.
EMPTY = (
    r"^\|[ :|-]+\|\n(?!\|)|^(#+) .*\s+(?!\1#)(?=#|---$|\Z)|at 0 tokens|Every call: \."
)


def read(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return without_code(text) if page.suffix == ".md" else text


def without_code(markdown: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "code", markdown, flags=re.M | re.S)


def links(text: str) -> list[str]:
    """Where a page leads, pictures included."""
    found = re.findall(r'\]\(([^)\s]+)\)|\b(?:href|src)="([^"]*)"', text)
    return [unescape("".join(x)) for x in found]


def places(page: Path) -> list[str]:
    """What a link may name in a page, in Markdown its headings."""
    found = re.findall(r'\bid="([^"]+)"|^#+ (.*)$', read(page), re.M)
    return [name or render.slug(title) for name, title in found]


def leads(page: Path, link: str) -> bool:
    """Whether the file and the place in it are there; an address is judged by its form."""
    if ":" in link:
        return bool(re.match(r"https://[\w-]+(\.[\w-]+)+(/|$)|data:image/", link))
    path, _, place = link.partition("#")
    there = page.parent / path if path else page
    return there.is_file() and (not place or place in places(there))


@pytest.mark.parametrize("page", PAGES, ids=lambda x: str(x.relative_to(REPORTS)))
def test_links_and_pictures_are_there_and_nothing_is_empty(page):
    text = read(page)
    assert [x for x in links(text) if not leads(page, x)] == []
    empty = re.finditer(EMPTY, text, re.M) if page.suffix == ".md" else ()
    assert [x[0] for x in empty] == []


def test_what_is_missing_is_seen(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A, b\n\n## C\n\n# D\n\n[x](a.md#a-b), ![x](c.png), `[x](d)`\n")
    assert [leads(page, x) for x in links(read(page))] == [True, False]
    assert [x[0] for x in re.finditer(EMPTY, read(page), re.M)] == ["## C\n\n"]


@pytest.mark.parametrize("number", DOCUMENTS)
def test_next_steps_and_names_have_answers_and_links_that_lead(number, monkeypatch):
    without = Shown(DOCUMENTS[number].report, study_of([])).text
    assert not re.search(EMPTY, without_code(without), re.M)
    keys = ["next"] if number in ("000", "004") else ["next", "names"]
    assert all(report.next_steps(number, key).markdown in without for key in keys)
    monkeypatch.chdir(REPORTS)  # where notebooks of pages run
    for table in [report.next_steps(number, key) for key in keys]:
        found = links(table.html) + links(table.markdown)
        right = [leads(REPORTS / "cpu" / "x", y) for y in found]
        assert right == [True] * 2 * len(table.rows)


def test_zero_rows_are_counted_and_eight_ranks_are_shown():
    """Heads in groups of 3, 3 and 2, at rates 1, 2 and 4."""
    three = patterns.Dilated([32, 64, 128], [1, 2, 4], "head_groups", "branch")
    assert "37.5 %" in report.zero_rows(three, 256, 8)
    for number in ("000", "001", "003", "004"):
        assert "25.0 % of the rows" in shown(number).text
    for number in ("002", "003", "004"):
        assert "V2Robust and Hybrid are one class" in shown(number).text
    line = r"8 ranks.*sends 96 MiB and holds 65.7 MiB. Simulated .* passed its check: 4.0e-07"
    assert re.search(line, shown("001").text)


@pytest.mark.parametrize("profile", ["cpu", "gtx1080", "h200"])
def test_one_question_has_one_value_on_all_pages(profile, capsys):
    """Up to which length dense attention lasts, what a layer takes and which length
    fits: on the index, the pages and in README, as the commands and the explorer say.
    """
    facts = read_manifest(REPORTS / profile)["first_screen"]["facts"]
    index = (REPORTS / "index.md").read_text().partition(f"## {profile}: ")[2]
    pages = [p.read_text() for p in (REPORTS / profile).glob("*.md")]
    if profile != "cpu":  # which is another one elsewhere
        values = explore.values_of(profile, facts["seq_len"], 1) | {"show": "advice"}
        cli.main(["advise", "--profile", profile, "--seq-len", values["seq_len"]])
        asked = explore.page(values), capsys.readouterr().out
        assert all(f"takes    {facts['advised']}\n" in x for x in asked)
        pages += asked
    text = re.sub(r"\s+#?\s*", " ", " ".join([index.partition("\n## ")[0], *pages]))
    lasts = (
        "ense attention (?:stays within 1 s a call )?up to (?:about|at most) ([0-9,]+)"
    )
    assert {*re.findall(lasts, text)} == {f"{rounded(facts['dense_until']):,}"}
    assert all(f"{most:,}" in index for most in facts["longest"].values())
    if profile != "gtx1080":  # of which README speaks
        return
    readme = (ROOT / "README.md").read_text()
    least = re.findall(r"at least ([\d.]+ s)", readme)
    assert [f"≥ {x}" for x in least] == [facts["takes"][x] for x in ("exact", "far")]
    # Both of which the advice is made, and the longest that fits with both.
    both = {"block_size": 512}, {"pattern": "dense"}
    calls = [explore.call_of(values | {"pattern": "window"} | x) for x in both]
    said = [explore.estimated(call) for call in calls]
    assert f"at least {least[0]}" in said[1]
    fitting = re.findall("longest +([0-9,]+)", " ".join(said))
    most = min(int(x.replace(",", "")) for x in fitting)
    assert most == facts["longest"]["fwd"]

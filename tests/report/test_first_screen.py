"""The first screen of a profile: it says what the rows, `advise` and `longest` say, and
nothing else.
"""

import functools
import re
from functools import partial

from reporting import MEMORY, longer, made_up, study_of
from ringlab import Dense, advise, hardware, longest
from ringlab.advise import local
from ringlab.advise import local as window
from ringlab.cost import format_seconds
from ringlab.measure import Group, Point, suites
from ringlab.report import first_screen, index, render, tables
from ringlab.report.evidence import evidence
from ringlab.report.study import Study, with_rates


def study(profile: str = "cpu") -> Study:
    about, computed = hardware.get_profile(profile), profile != "cpu"
    groups = suites.landscape(about)
    rows = [made_up(p, g, computed) for g in groups for p in g.points]
    return study_of(rows, profile, computed)


def screen_of(about: Study) -> first_screen.FirstScreen:
    return first_screen.first_screen(about, {})


@functools.cache
def screen():
    return screen_of(study())


def test_every_number_is_one_of_advise_or_longest():
    found, rows, longest_window = screen(), evidence(study()), window(2**20)
    ask = partial(advise, with_rates(study()), memory_bytes=MEMORY, rows=rows)
    for n, line in zip(first_screen.LENGTHS, found.table.rows):
        options = {x.need: x for x in ask(n, passes="fwd").options}
        advice, training = ask(n, passes="fwd"), ask(n, passes="fwd+bwd")
        length, use, forward, both, memory, dense, local = line
        assert (length, use) == (n, advice.advised.name)
        assert forward.text == advice.advised.takes
        assert memory == tables.size(training.need_bytes)
        assert dense.text == options["exact"].takes
        assert local.text == options["local"].takes
        fits = training.advised.peak_bytes <= MEMORY
        assert both.text == (training.advised.takes if fits else "does not fit")
    facts, at = found.facts, ask(found.facts["seq_len"], passes="fwd")
    assert facts["takes"] == {x.need: x.takes for x in at.options}
    assert facts["dense_until"] == ask(8192, passes="fwd").dense_until
    for passes, most in facts["longest"].items():
        how = {"passes": passes, "profile": "cpu"}
        each = [longest(p, MEMORY, **how) for p in (Dense(), longest_window)]
        assert most == min(each)
    assert facts["checked"][0] == len(study().good)
    assert sum(facts["rejected"].values()) + facts["checked"][0] == facts["checked"][1]


def test_a_measured_call_is_measured_and_none_of_another_call(monkeypatch):
    """Other systems and settings on the same pattern are no answer to what the advised
    call takes.
    """
    monkeypatch.setattr(first_screen, "LENGTHS", (8192,))
    plain = Point("ringlab", local(8192), seq_len=8192)
    others = plain.but(options={"merge": "eager"}), plain.but(system="copying")
    group = Group("g", (plain, *others))
    mine, *quicker = (made_up(p, group, False) for p in group.points)
    there = study()
    kept = [r for r in there.results if r.point != plain]
    quick = [longer(r, 0.01, bound_seconds=1e-9) for r in quicker]
    there.results = [*kept, mine, *quick]
    assert screen_of(there).table.rows[0][6].text == format_seconds(mine.median)
    assert "about" not in screen_of(there).table.rows[0][6].text


def test_a_gpu_that_is_not_here_has_computed_numbers_alone(monkeypatch):
    monkeypatch.setattr(first_screen, "LENGTHS", (131072, 1048576))
    found = screen_of(study("gtx1080"))
    assert found.title.endswith("GTX 1080, computed")
    times = [x.text for line in found.table.rows for x in (*line[2:4], *line[5:])]
    assert times[0].startswith("≥ ") and times[-1] == "does not fit"
    assert all(x.startswith("≥ ") or x == "does not fit" for x in times)
    assert found.facts["computed"] and found.facts["kernel"] == "efficient"


def test_a_device_of_unknown_rates_and_memory_has_a_first_screen():
    found = screen_of(study("generic"))
    assert found.facts["longest"] is None
    assert found.facts["dense_until"] is None and found.figure is None
    assert found.table.rows[0][2].text == "not known"


def said(html: str) -> list[str]:
    """The four answers of an index, without marks."""
    part = html.partition('<div class="answer">')[2].partition("</div>")[0]
    return [re.sub(r"<[^>]*>", "", x) for x in re.findall("<li>(.*?)</li>", part)]


def test_the_index_shows_four_short_answers_and_all_of_it(tmp_path):
    found, folder = screen(), tmp_path / "cpu"
    render.write(folder / "figures" / "advised.svg", found.figure.svg)
    about = {"reports": [], "first_screen": found.stored()}
    index.write_manifest(folder, about, complete=True)
    index.write_index(tmp_path)
    html = (tmp_path / "index.html").read_text()
    plain = (tmp_path / "index.md").read_text()
    assert html.count("<svg ") == 1
    assert found.table.html in html and found.table.markdown in plain
    answers = said(html)
    assert len(answers) == 4
    for answer in answers:
        question, _, words = answer.partition("? ")
        assert re.search(r"\d", words) and len(words.split()) <= 25, answer
        assert f"- {question}? " in plain
    for n in found.facts["longest"].values():
        assert f"{n:,}" in answers[1] and f"{n:,}" in plain
    about["first_screen"] = {"lines": ["of an earlier version"]}
    index.write_manifest(folder, about, complete=True)
    index.write_index(tmp_path)
    assert "What to use" not in (tmp_path / "index.html").read_text()

"""The first screen of a profile: it says what the rows, `advise` and `longest` say, and
nothing else.
"""

import functools
import re
from dataclasses import replace

import pytest
import ringlab
from reporting import MEMORY, Shown, longer, made_up, study_of
from ringlab import hardware
from ringlab.advise import ladder
from ringlab.measure import Group, Point, peers, suites
from ringlab.report import findings, first_screen, index, predicted, render, tables
from ringlab.report.study import Study


def study(profile: str = "cpu", change=lambda r: r) -> Study:
    about, rehearsal = hardware.get_profile(profile), profile != "cpu"
    groups = suites.landscape(about, device="cpu", rehearsal=rehearsal)
    rows = [change(made_up(p, g, rehearsal)) for g in groups for p in g.points]
    return study_of(rows, profile, rehearsal)


PICTURE = {"name": "landscape-time", "caption": "time", "alt": "time", "svg": "<svg />"}


def screen_of(about: Study, **findings) -> first_screen.FirstScreen:
    drawn = {} if about.rehearsal else {"landscape-time": PICTURE}
    found = {"landscape": ["**8 tokens**: quick."], **findings}
    return first_screen.first_screen(about, found, drawn)


@functools.cache
def screen():
    return screen_of(study())


def finding(change=lambda r: r) -> str:
    """What the page of the landscape finds."""
    about = study(change=change)
    about.results = [r for r in about.results if r.point.system != "generation"]
    return Shown("landscape", about).texts[0]


def test_the_finding_is_the_fastest_row_and_its_ratio_to_dense():
    rows = {
        r.point.id: r
        for r in study().results
        if r.median and (r.point.seq_len, r.point.passes) == (4096, "fwd")
    }
    dense = next(r for r in rows.values() if r.point.system == "dense_sdpa")
    quick = min(rows.values(), key=lambda r: r.median)

    def only_4096(r):
        return (
            r
            if r.point.seq_len <= 4096
            else replace(r, status="oom", reason="too long")
        )

    said = finding(only_4096)
    assert said.startswith("- **4,096 tokens, forward, measured: ")
    assert f"takes {tables.number(quick.median * 1e3)} ms, " in said
    assert (
        f"{tables.number(dense.median / quick.median, 2)} times as fast as torch's dense"
        in said
    )
    trained = next(
        r for r in study().results if r.point == quick.point.but(passes="fwd+bwd")
    )
    took = tables.number(trained.median * 1e3)
    assert f"at 4,096 tokens: Sliding window is the fastest ({took} ms)" in said


def test_what_the_run_does_not_tell_apart_is_named_together():
    def even(r):
        sparse = r.point.system == "ringlab" and r.seconds
        return longer(r, 0.01 / r.median, bound_seconds=1e-4) if sparse else r

    said = finding(even).splitlines()[0]
    tied, within, _ = said.partition("are within noise of it")
    named = re.findall(
        r"Sliding window|BigBird|Local and global|LongNet from 256|LongNet from 2,048",
        tied,
    )
    assert len({*named}) == 5 and within

    def but_bigbird(r):
        return longer(even(r), 2) if "random" in str(r.point.pattern) else even(r)

    said = finding(but_bigbird).splitlines()[0]
    assert "BigBird" not in said


def test_a_run_without_dense_attention_or_without_a_right_system_has_a_first_screen():
    def lost(r, systems):
        gone = {
            "status": "crashed",
            "reason": "gone",
            "seconds": (),
            "rounds": (),
            "median": None,
            "ci": None,
        }
        return replace(r, **gone) if r.point.system in systems else r

    no_dense = finding(lambda r: lost(r, ("dense_sdpa",)))
    assert "dense attention" not in no_dense
    only_dense = finding(lambda r: lost(r, ("ringlab", "flex", *peers.PEERS)))
    assert "Dense SDPA takes" in only_dense and "as fast as" not in only_dense
    wrong = {"status": "incorrect", "reason": "dq is off", "errors": {"dq": 1.0}}
    none = finding(
        lambda r: replace(
            lost(r, ("flex", *peers.PEERS)),
            **(wrong if r.point.passes != "fwd" else {}),
        )
    )
    assert "none, no system that passed its checks was timed" in none
    half = study(change=lambda r: replace(r, point=r.point.but(dtype="bfloat16")))
    assert "≥" in screen_of(half).table.markdown


def test_lengths_memory_and_bytes_are_those_of_the_commands():
    found = screen()
    patterns = ringlab.advise("cpu", 131072, passes="fwd")["pattern"], ringlab.Dense()
    for p in patterns:
        most = [
            ringlab.longest(p, MEMORY, profile="cpu", passes=x)
            for x in ("fwd", "fwd+bwd")
        ]
        assert all(f"{n:,}" in found.lines[1] for n in most)
    over = [x for r, x in predicted.compared(study())[0] if r.point.heads == 8]
    right = f"{sum(abs(x) <= 0.01 for x in over)} of {len(over)} measured peaks"
    assert (
        f"{right}, of calls up to 32,768 tokens, are as computed to 1 %"
        in found.lines[1]
    )
    assert [line[0] for line in found.table.rows] == list(first_screen.LENGTHS)
    heads = first_screen.SHAPE["heads"]
    for n, _, _, far, *_ in found.table.rows:
        rate = max(1, n // 2048)  # of the longest segment, which holds the sequence
        assert far == f"{tables.number(100 * min(heads, rate) / rate)} %", n
    for line, said in zip(found.table.rows[:2], found.overview):
        n = line[0]
        forward, across = (
            ringlab.advise("cpu", n, passes="fwd"),
            ringlab.advise("cpu", n, ranks=2),
        )
        sent = tables.size(across.proposals[0].sent_bytes)
        assert (
            f"a training call of these lengths sends {sent} in all" in found.table.note
        )
        assert (
            line[4].sub == tables.size(forward.need_bytes)
            and said == f"{line[4].text}, fits; dense {line[7].text}"
        )


def test_the_first_screen_and_the_pages_say_the_same_of_trust():
    def worse(r):
        return (
            replace(r, status="incorrect", reason="dq is off")
            if r.point.system == "flex"
            else r
        )

    for rows in (study(), study(change=worse)):
        said, passed = findings.trust_line(rows), len(rows.good)
        every = sum(r.status != "unsupported" for r in rows.results)
        assert f"{passed} of {every} measurements passed their check" in said
        assert ("; rejected: " in said) == (passed < every)
    assert (
        findings.trust_line(study()) in screen().lines[2]
        and "times its roofline" in screen().lines[2]
    )


def test_rooflines_of_a_cpu_come_from_its_rows():
    def bounds(found):  # of the lengths that were not measured
        told = (re.match(r"≥ ([\d.,]+) ", line[4].text) for line in found.table.rows)
        return [float(x[1].replace(",", "")) for x in told if x]

    def half(r):
        return replace(r, bound_seconds=r.bound_seconds and r.bound_seconds / 2)

    once, twice = screen(), screen_of(study(change=half))
    assert bounds(once)[0] / bounds(twice)[0] > 1.9
    assert all(a > b for a, b in zip(bounds(once), bounds(twice)))


def test_a_measured_time_is_that_of_the_call_as_it_is_advised(monkeypatch):
    """Other systems and settings on the same pattern are no answer to what the advised
    call takes.
    """
    monkeypatch.setattr(first_screen, "LENGTHS", (8192,))
    plain = Point("ringlab", ladder(8192), seq_len=8192)
    others = (
        plain.but(options={"merge": "eager"}),
        plain.but(system="copying"),
        plain.but(system="plan_build"),
    )
    group = Group("g", (plain, *others))
    mine, *quicker = (made_up(p, group, False) for p in group.points)
    there = study()
    there.results = [
        *there.results,
        mine,
        *(longer(r, 0.01, bound_seconds=None) for r in quicker),
    ]
    found = screen_of(there).table.rows[0]
    dense = next(
        r
        for r in there.results
        if r.point.system == "dense_sdpa" and r.point.seq_len == 8192
    )
    assert found[4].text == f"{tables.number(mine.median * 1e3)} ms"
    assert found[7].text == f"{tables.number(dense.median)} s"


def test_a_rehearsal_shows_no_time_of_this_machine(monkeypatch):
    measured = "".join(screen().lines)  # before other lengths are set, as it is kept
    monkeypatch.setattr(first_screen, "LENGTHS", (131072, 524288))
    found = screen_of(study("gtx1080"))
    assert found.title.endswith("GTX 1080, computed") and [
        f.name for f in found.figures
    ] == ["first-screen-computed"]
    bound = ringlab.advise("gtx1080", 131072, passes="fwd").proposals[0].bound_s
    assert f"takes at least {tables.number(bound * 1e3)} ms" in found.lines[0]
    assert found.table.rows[-1][5].text == "does not fit"
    assert "measured" not in found.lines[0] + found.lines[1].replace(
        "measured peaks", "peaks"
    )
    there = found.lines[-1]
    assert (
        "fp32 by the kernel `efficient`; `flash` is refused: needs compute capability 8.0"
        in there
    )
    assert "`make report GPU=gtx1080`" in there and "`make report" not in measured


def test_a_device_of_unknown_rates_and_memory_has_a_first_screen():
    found = screen_of(study("generic"))
    assert (
        not found.figures
        and "its rates are not known" in found.lines[0]
        and "not known" in found.lines[1]
    )
    assert found.overview == ["not known, memory not known"] * 2
    with pytest.raises(ValueError, match="no rate is known of"):
        first_screen.rooflines(hardware.get_profile("generic"), {}, None)


def test_too_few_rooflines_are_said_to_be_too_few():
    few = study("gtx1080")
    few.results = few.results[:1]
    learned = "**What small models learned**, of 4 layers: use Window to recall."
    _, _, trust, what, *_ = screen_of(few, quality=[learned]).lines
    assert (
        "lower bounds, and nothing was measured on this device. Too few of the times"
        in trust
    )
    assert what == learned


def test_the_index_shows_all_of_it(tmp_path):
    found, folder = screen(), tmp_path / "cpu"
    for f in found.figures:
        render.write(folder / "figures" / f"{f.name}.svg", f.svg)
    index.write_manifest(
        folder, {"reports": [], "first_screen": found.stored()}, complete=True
    )
    index.write_index(tmp_path)
    html, plain = (
        (tmp_path / "index.html").read_text(),
        (tmp_path / "index.md").read_text(),
    )
    assert html.count("<svg ") == 2 and all(line in plain for line in found.lines)
    assert found.table.html in html and found.table.markdown in plain
    for text in (html, plain):
        assert "at 1,048,576 tokens 1.56 % of the queries see" in text
        assert "keys from all" not in text and "in its paper" not in text
        assert "by the factor under Trust" not in text

"""The explorer: its numbers, what its controls refuse, Run, and the whole of it in a real browser."""

import random
import re
import sys
import threading
from html import unescape
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from browser import browser, chromium, jupyterlab
from reporting import CPU, made_up, run_in_this_process
from ringlab import hardware, measure, patterns, ring
from ringlab.estimate import estimate
from ringlab.report.explore import panel, pictures, trial, view
from ringlab.report.explore.choice import KINDS, Choice, check_countable, counts
from ringlab.ring import volume

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "explore.ipynb"
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 8, "block_size": 16, "lengths": "32 64", "rates": "1 2"}


def drawn_choices():
    """Choices of every kind of pattern, small and odd."""
    rng, found = random.Random(0), []
    for kind in [*KINDS, "dilated", "dilated", "dilated"]:
        lengths = [rng.randint(2, 90) for _ in range(3)]
        rates = [rng.randint(1, min(9, w)) for w in lengths]
        texts = {"lengths": " ".join(map(str, lengths)), "rates": ", ".join(map(str, rates)), "levels": "1 x 2, 3 x 9"}
        about = {"mixing": rng.choice(patterns.MIXINGS), "offsets": rng.choice(patterns.OFFSETS), "window": 1}
        n = str(rng.randint(150, 260))
        found.append(Choice(kind, seq_len=n, causal=rng.random() < 0.5, **SMALL | texts | about, head=rng.randrange(4)))
    return found


@pytest.mark.parametrize("choice", drawn_choices(), ids=lambda c: c.kind)
def test_the_pattern_is_shown_as_it_is(choice):
    n, pattern, x = choice.n, choice.pattern, torch.arange(choice.n)
    about = {"head": choice.head, "heads": 4, "kv_heads": 2}
    for causal in (True, False):
        whole = pattern.multiplicity(x, x, n=n, **about)  # (q, k)
        whole = whole.tril() if causal else whole
        assert torch.equal(view.near(pattern, n, range(40, 104), **about, causal=causal), whole[40:104, 40:104])
        edges = [i * n // 23 for i in range(24)]
        mean = [[whole[a:b, c:d].double().mean() for c, d in zip(edges, edges[1:])] for a, b in zip(edges, edges[1:])]
        found = view.afar(pattern, n, **about, causal=causal, cells=23)
        assert torch.allclose(found, torch.tensor(mean, dtype=torch.float64), rtol=1e-12)
        each = view.afar(pattern, n, **about, causal=causal, cells=1000)  # a cell for each position
        assert torch.equal(each.long(), whole)


def test_a_billion_positions_are_exact():
    """Mean M of the whole is the number of pairs over n^2, and the picture of a ladder falls off by its rates."""
    choice = Choice(lengths="1M 32M 1G", rates="1 32 1024", seq_len="1G")
    check_countable(choice.pattern, choice.n)
    found = view.afar(choice.pattern, choice.n, head=0, heads=1, kv_heads=1, causal=False, cells=64)
    assert found[0, -1] * 2**20 == 1 and float(found.mean()) == pytest.approx(2**-10 + 2**-15 + 2**-20, rel=1e-12)


@pytest.mark.parametrize("scheme, passes", [*((scheme, "fwd+bwd") for scheme in ring.SCHEMES), ("plan", "fwd")])
def test_the_traffic_is_what_each_rank_sends(scheme, passes):
    about = SMALL | {"lengths": "64 256", "layout": "zigzag", "passes": passes}
    choice = Choice(seq_len="256", ranks=4, scheme=scheme, **about)
    found = estimate(choice.pattern, **choice.call)
    problem = ring.Problem(choice.pattern, ring.zigzag(256, 4), False, 4, 2)
    about = {"batch": 1, "head_dim": 8, "dtype": torch.float32, "passes": passes}
    sent = view.matrix(found)
    assert [sum(row) for row in sent] == [volume.sent_bytes(problem, r, scheme, **about) for r in range(4)]
    assert all(sent[r][r] == 0 for r in range(4)) and sum(map(sum, sent)) > 0
    assert f"by {scheme}" in pictures.traffic(found)


def test_the_parts_of_the_memory_are_the_peak():
    choice = Choice(seq_len="512", ranks=2, passes="fwd+bwd", **SMALL)
    found = estimate(choice.pattern, **choice.call)
    assert sum(found.parts.values()) == found.peak_bytes
    said = alts(pictures.memory(found, 2**30))
    assert all(f"{name} " in said for name, x in found.parts.items() if x) and "gradients" in said


def alts(html: str) -> str:
    return " | ".join(map(unescape, re.findall(r'alt="([^"]*)"', html)))


# ---------------------------------------------------------------------------------------------------------------------
# what cannot be

REFUSED = [
    ({"lengths": "2048, x"}, "segment lengths must be positive integers, as 2048, 4096 or 2K 4K, not 'x'"),
    ({"lengths": ""}, "segment lengths must be positive integers, as 2048, 4096 or 2K 4K, and there is none"),
    ({"rates": "1"}, "segment_lengths and dilation_rates differ in length: 3 and 1"),
    ({"lengths": "97 101 103 107 109", "rates": "1 1 1 1 1", "seq_len": "1G"}, "5 branches that do not nest"),
    ({"lengths": " 8" * 11, "rates": " 1" * 11}, "11 branches are too many to draw; up to 10 are"),
    ({"seq_len": "long"}, "sequence length must be positive integers, as 2048, 4096 or 2K 4K, not 'long'"),
    ({"seq_len": "1 2"}, "sequence length must be one number, as 8192 or 128K, got '1 2'"),
    ({"seq_len": "0"}, "sequence length must be in 1 .. 1,073,741,824 (1G), got 0"),
    ({"seq_len": "2G"}, "sequence length must be in 1 .. 1,073,741,824 (1G), got 2,147,483,648"),
    ({"heads": 7, "kv_heads": 2}, "heads must be a multiple of K/V heads, got 7 and 2"),
    ({"kv_heads": 0}, "kv_heads must be a positive integer, got 0"),
    ({"ranks": -1}, "ranks must be a positive integer, got -1"),
    ({"ranks": 65}, "65 ranks are too many to draw; up to 64 are"),
    ({"ranks": 9, "seq_len": "8"}, "9 ranks are more than the sequence's 8 positions"),
    ({"kind": "BigBird", "seq_len": "64M"}, "take blocks of at least 65536, or a shorter sequence"),
    ({"kind": "BigBird", "block_size": 0}, "block_size must be a positive integer up to 2**40, got 0"),
    ({"kind": "hierarchical", "levels": "1 2"}, "levels must be stride x reach in blocks, as 1 x 2, 8 x 32; got '1 2'"),
    ({"kind": "sliding window", "seq_len": "64"}, "block_size 128 exceeds the sequence length 64"),
]  # fmt: skip


@pytest.mark.parametrize("changed, said", REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_one_line(changed, said):
    choice = Choice(**changed)
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        assert not choice.call
    assert "\n" not in str(refused.value)


def test_texts_are_read_as_people_write_them():
    assert counts("n", "[2048, 4K]") == counts("n", "2_048 4k") == [2048, 4096]
    assert Choice(seq_len=" 128K ").n == 2**17 and Choice(levels="1:2, 8 × 32", kind="hierarchical").pattern


def test_the_call_as_code_runs():
    for kind in KINDS:
        choice = Choice(kind, seq_len="128", ranks=2, passes="fwd+bwd", causal=True, **SMALL | {"levels": "1 x 2"})
        names = {}
        exec(view.code(choice), names)
        assert names["pattern"] == choice.pattern and names["q"].grad.shape == (1, 128, 4, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Run

HERE = trial.Here(CPU, hardware.get_profile("cpu").on(CPU), 8 * 2**30)


def test_a_point_too_large_for_this_machine_is_one_line(monkeypatch):
    monkeypatch.setattr(measure, "run", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(ValueError, match="^too large for this machine: .* free are 8 GiB; take a shorter sequence$"):
        trial.run(Choice(seq_len="4M"), HERE)
    monkeypatch.setattr(sys.modules["ringlab.estimate"], "_probed", lambda _: hardware.Peaks(1e11, 1e10, 1e10))
    with pytest.raises(ValueError, match="^too long for this machine: 5 calls of at least 320 s each, compute binds"):
        trial.run(Choice(kind="dense", seq_len="128K"), HERE)


def test_run_measures_the_chosen_point_and_sets_it_beside_the_estimate(monkeypatch):
    asked = []

    def run(groups, folder, **how):
        asked.append((groups, how))
        point = groups[0].points[0]
        found = {"bytes_sent": [4096, 4096], "oversubscribed": False}
        memory = {"floor_bytes": 1000, "tracked_peak_bytes": 2**20}
        return [made_up(point, groups[0], False, ranks=found, memory=memory)]

    monkeypatch.setattr(measure, "run", run)
    choice = Choice(seq_len="256", ranks=2, scheme="ring", dtype="float64", causal=True, **SMALL)
    result = trial.run(choice, HERE)
    (_, how), point = asked[0], result.point
    assert how["profile"].name == "cpu" and how["timeout_s"] == trial.LIMIT_S
    assert (point.seq_len, point.world_size, point.dtype, point.causal) == (256, 2, "float64", True)
    assert dict(point.options) == {"scheme": "ring", "layout": "contiguous"}
    line = trial.table([(choice, result)], HERE).rows[0]
    found = estimate(choice.pattern, **choice.call, profile=HERE.profile)
    assert line[1].text == view.number(result.median * 1e3)
    assert line[3].text == "1 MiB" and f"{100 * (found.peak_bytes / 2**20 - 1):+.2g} %" in line[3].sub
    assert line[4].text == "8 KiB" and "estimated" in line[4].sub and line[5].text == "4.0e-07"


@pytest.mark.parametrize("changes, said", [
    ({"errors": {"out": 1e-3}}, "incorrect: out is off by 1.0e-03, allowed 5.0e-06"),
    ({"errors": {}}, "suspect: no correctness check"),
    ({"status": "timeout", "reason": "took more than 60 s"}, "timeout: took more than 60 s"),
])  # fmt: skip
def test_no_number_without_its_check(changes, said):
    choice = Choice(seq_len="256", profile="gtx1080", **SMALL)
    point = trial.point(choice)
    shown = trial.table([(choice, made_up(point, measure.Group("explore", (point,)), False, **changes))], HERE)
    assert shown.rows[0][1].text == said and shown.rows[0][2:] == [None] * 4
    assert "gtx1080" in shown.note and "not theirs" in shown.note


# ---------------------------------------------------------------------------------------------------------------------
# the panel, without a front end


def test_without_ipywidgets_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    shown = run_in_this_process(NOTEBOOK, None, {}).cells[-2].outputs[0].data["text/plain"]
    assert shown == panel.MISSING and "pip install" in shown


@pytest.fixture
def opened(monkeypatch):
    pytest.importorskip("ipywidgets", reason="the explorer needs ipywidgets")
    monkeypatch.setattr(pictures, "DPI", 30)
    monkeypatch.setattr(panel, "_longest", lambda pattern, profile, call: 1000 * call.get("ranks", 1))
    found = panel.explorer("gtx1080", seq_len="512", **SMALL | {"lengths": "64 512"})
    yield found
    found.settle()


def test_every_place_follows_the_controls(opened):
    def shown():
        return {name: place.value for name, place in opened.places.items()}

    def changed(**controls) -> set:
        before = shown()
        for name, value in controls.items():
            opened.controls[name].value = value
        assert opened.places["alert"].value == "", opened.places["alert"].value
        return {name for name, html in shown().items() if html != before[name]}

    def visible():
        return {name for name, control in opened.controls.items() if control.layout.display != "none"}

    bundle, figures = opened._repr_mimebundle_(), plt.get_fignums()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "Estimate for NVIDIA GeForce GTX 1080" in bundle["text/plain"] == bundle["text/markdown"], "without widgets"
    assert "lengths" in visible() and not {"window", "levels", "scheme", "layout"} & visible()
    assert changed(ranks=2) >= {"pattern", "facts", "traffic", "memory", "bounds", "code"}
    assert "Sent between 2 ranks by plan" in alts(opened.places["traffic"].value)
    moved = changed(profile="h100", dtype="bfloat16")
    assert moved >= {"facts", "bounds"} and "pattern" not in moved and "NVIDIA H100" in opened.places["facts"].value
    assert {"lengths", "scheme", "layout"} <= visible() and not {"window", "levels"} & visible()
    assert changed(kind="hierarchical") >= {"pattern", "facts", "traffic", "memory", "bounds", "code"}
    assert {"levels", "block_size", "scheme", "layout"} <= visible() and not {"lengths", "window"} & visible()
    assert changed(passes="fwd+bwd", scheme="ulysses") >= {"facts", "traffic", "memory", "bounds", "code"}
    assert plt.get_fignums() == figures, "all are closed"


def test_the_longest_sequence_follows_and_only_for_what_is_still_asked(opened, monkeypatch):
    asked, begun, go = [], threading.Event(), threading.Event()

    def longest(pattern, profile, call):
        asked.append(call.get("ranks", 1))
        begun.set()
        assert go.wait(30) and profile.name == "gtx1080"
        return 1000 * asked[-1]

    opened.settle()
    monkeypatch.setattr(panel, "_longest", longest)
    assert "<td>1,000</td>" in opened.places["facts"].value
    opened.controls["ranks"].value = 2
    assert begun.wait(30)
    opened.controls["ranks"].value = 3
    opened.controls["ranks"].value = 4
    assert "<td>...</td>" in opened.places["facts"].value
    go.set()
    opened.settle()
    assert asked == [2, 4] and "<td>4,000</td>" in opened.places["facts"].value
    opened.controls["ranks"].value = 1
    assert asked == [2, 4] and "<td>1,000</td>" in opened.places["facts"].value, "it is known"


def test_bad_input_is_one_line_and_nothing_of_another_choice_stays(opened):
    for name, bad, good in (("lengths", "32, ?", "32 64"), ("at", "4096", "0")):
        opened.controls[name].value = bad
        said = opened.places["alert"].value
        assert 'role="alert"' in said and "Traceback" not in said and said.count("<p") == 1
        rest = ("pattern", "facts", "memory", "traffic", "bounds", "code")
        assert [opened.places[x].value for x in rest] == [""] * 6 and opened.button.disabled
        opened.controls[name].value = good
        assert opened.places["alert"].value == "" and opened.places["facts"].value and not opened.button.disabled


def test_run_that_fails_is_one_line(opened, monkeypatch):
    errors = {"no room": ValueError("no\nroom"), "Stopped.": KeyboardInterrupt(), "full": OSError("full")}
    for said, error in errors.items():
        monkeypatch.setattr(trial, "run", lambda *a, error=error: (_ for _ in ()).throw(error))
        opened.button.click()
        assert said in opened.places["status"].value and not opened.button.disabled and not opened.results


# ---------------------------------------------------------------------------------------------------------------------
# in a browser

CONTROL = """(label) => [...document.querySelectorAll('.jupyter-widgets')].find(
    (w) => w.querySelector('label')?.textContent === label)?.querySelector('select, input')"""
SET = f"""((label, value) => {{
    const control = ({CONTROL})(label);
    control.value = value;
    control.dispatchEvent(new Event('change', {{bubbles: true}}));
}})"""
ALTS = "[...document.querySelectorAll('.jp-OutputArea figure img')].map((i) => i.alt).join(' | ')"
BUTTON = "[...document.querySelectorAll('button')].find((b) => b.textContent.includes('Run on this machine'))"
TABLES = "[...document.querySelectorAll('.jp-OutputArea tbody')].map((t) => t.innerText).join(' | ')"
WRONG = "document.querySelectorAll('.jp-OutputArea [data-mime-type*=error], [data-mime-type*=stderr]').length"


# No front end is needed for more samples than the fewest.
QUICK = """
from ringlab.measure import timing
timing.MAX_SAMPLES = timing.SAMPLES
"""


def test_the_explorer_in_a_browser(tmp_path):
    """JupyterLab as `make lab` opens it: run all cells, change controls, make a mistake, mend it, press Run."""
    pytest.importorskip("ipywidgets", reason="the explorer needs ipywidgets")
    command = browser()
    with jupyterlab(tmp_path, NOTEBOOK, QUICK) as url, chromium(command, tmp_path, url) as page:
        page.until("typeof jupyterapp !== 'undefined' && !!document.querySelector('.jp-Notebook')", 60)
        page.until("!!jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel", 60)
        page.js("jupyterapp.commands.execute('notebook:run-all-cells'); 1", wait=False)
        page.until(f"!!({CONTROL})('pattern')", 60)
        page.until(f"({ALTS}).includes('What head 0 of 8 sees: dilated [2048, 4096, 8192]')")

        def choose(label, value, shows):
            page.js(f"{SET}({label!r}, {value!r})")
            page.until(f"({ALTS}).includes({shows!r})")
            page.until(f"!{BUTTON}.disabled")

        choose("ranks", 2, "Sent between 2 ranks")
        choose("hardware", "gtx1080", "compute binds")
        choose("pattern", "dense", "sees: dense, n = 8,192")
        page.js(f"{SET}('length n', '1 kilo')")
        page.until("document.querySelector('.jp-OutputArea [role=alert]')?.textContent.includes('kilo')")
        assert page.js(ALTS) == "" and page.js(f"{BUTTON}.disabled")
        choose("length n", "1K", "sees: dense, n = 1,024")
        assert not page.js("!!document.querySelector('.jp-OutputArea [role=alert]')")
        estimated = page.js(TABLES)
        page.js(f"{BUTTON}.click()")
        page.until(f"({TABLES}).includes('p=2 n=1024 float32 fwd')", 60)
        page.until(f"!{BUTTON}.disabled")
        measured = page.js(TABLES).replace(estimated, "")
        assert page.js(WRONG) == 0
    checked = "as estimated" in measured and re.search(r"\d\.\de-0\d\s+out ≤ 5\.0e-06", measured)
    assert checked or "below its bound" in measured, measured  # so a probe says that a busy machine disturbed

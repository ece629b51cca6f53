"""The explorer: its numbers, what its controls refuse, and the whole of it in a real
browser.
"""

import re
import sys
import threading
from dataclasses import replace
from html import unescape
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from browser import browser, chromium, jupyterlab
from reporting import run_in_this_process
from ringlab import advise, ring
from ringlab.estimate import estimate, longest
from ringlab.patterns import Dense
from ringlab.presets import NAMED, named
from ringlab.report import explore
from ringlab.report.explore import Choice
from ringlab.ring import volume

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "explore.ipynb"
SMALL = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "block_size": 16,
    "segment_lengths": "32 64",
    "dilation_rates": "1 2",
}


def alts(html: str) -> str:
    return " | ".join(
        map(unescape, re.findall(r'<svg role="img" aria-label="([^"]*)"', html))
    )


@pytest.mark.parametrize("kind", NAMED)
def test_the_pattern_is_shown_as_it_is(kind):
    for causal in (True, False):
        choice = Choice(kind, seq_len="150", causal=causal, head=3, at="40", **SMALL)
        x = torch.arange(40, 104)
        whole = choice.pattern.multiplicity(
            x, x, n=150, head=3, heads=4, kv_heads=2
        )  # (q, k)
        whole = whole.tril() if causal else whole
        said = explore.seen(choice).alt
        assert f"What head 3 of 4 sees: {choice.pattern}" in said
        assert said.endswith(f"one by one, {int((whole > 0).sum())} pairs are seen")


@pytest.mark.parametrize(
    "scheme, passes",
    [*((scheme, "fwd+bwd") for scheme in ring.SCHEMES), ("plan", "fwd")],
)
def test_the_traffic_is_what_each_rank_sends(scheme, passes):
    about = SMALL | {"segment_lengths": "64 256", "layout": "zigzag", "passes": passes}
    about["kind"] = "dilated"
    choice = Choice(seq_len="256", ranks=4, scheme=scheme, **about)
    problem = ring.Problem(choice.pattern, ring.zigzag(256, 4), False, 4, 2)
    about = {"batch": 1, "head_dim": 8, "dtype": torch.float32, "passes": passes}
    sent = [volume.sent_bytes(problem, r, scheme, **about) for r in range(4)]
    found = choice.estimate()
    table = explore.traffic(found)
    assert (
        sum(sent) > 0
        and table.caption
        == f"Sent between 4 ranks by {scheme}: {explore.size(sum(sent))}"
    )
    assert [line[:2] for line in table.rows] == [
        [f"rank {r}", explore.size(x)] for r, x in enumerate(sent)
    ]
    assert table.rows[1][2] == (
        explore.size(found.sent[1, 0]) if found.sent.get((1, 0)) else None
    )


def test_the_parts_of_the_memory_are_the_peak():
    found = Choice(seq_len="512", ranks=2, passes="fwd+bwd", **SMALL).estimate()
    assert sum(found.parts.values()) == found.peak_bytes
    lines = {line[0]: line[1:] for line in explore.memory(found).rows}
    assert "gradients" in lines and {name: x[0] for name, x in lines.items()} == {
        name: explore.size(x) for name, x in found.parts.items() if x
    }
    assert 98 <= sum(int(x[1].split()[0]) for x in lines.values()) <= 102


def test_facts_are_those_of_the_estimate():
    ladder = {
        "kind": "dilated",
        "segment_lengths": "2K 4K 8K 16K 32K 64K 128K",
        "dilation_rates": "1 2 4 8 16 32 64",
        "seq_len": "128K",
    }
    for controls in (
        ladder,
        ladder | {"seq_len": "1M", "ranks": 4},
        {"kind": "window", "seq_len": "32K", "before": 8},
        {"kind": "bigbird", "seq_len": "16K", "block_size": 64, "before": 1},
        {"kind": "dense", "seq_len": "8K"},
    ):
        choice = Choice(profile="gtx1080", **controls)
        found = choice.estimate()
        facts = {line[0]: line[1] for line in explore.facts(choice, found).rows}
        peak = explore.size(found.peak_bytes)
        assert facts["Fits"] == "yes" and facts["Peak memory of a rank"] == peak
        if choice.ranks == 1 and choice.kind in ("dense", "dilated"):
            assert facts["Longest sequence that fits"] == longest(
                choice.pattern, 8 << 30, profile="gtx1080"
            )


def test_variants_have_the_numbers_of_estimate():
    choice = Choice("window", seq_len="16K", profile="gtx1080", before=8)
    table = explore.compared(choice)
    lines = {line[0].text: line for line in table.rows}
    names = ["dense", "ladder", "window", "local_global", "bigbird"]
    assert list(lines) == [*names, "chosen"]
    for name, line in lines.items():
        pattern = (
            choice.pattern if name == "chosen" else named(name, 16384, choice.heads)
        )
        found = estimate(pattern, seq_len=16384, profile="gtx1080")
        assert line[0].sub == str(pattern)
        assert line[2] == explore.format_seconds(found.bound_s)
        assert line[3] == explore.size(found.peak_bytes)
    far = explore.variants(replace(choice, seq_len="1M", ranks=2))
    assert far["window"].count(1 << 20) == 1024 and "bigbird" not in far
    assert [line[5] for line in table.rows] == ["yes"] * 6
    alt = explore.over_length(choice).alt
    assert (
        "lower bounds" in alt
        and f"{longest(Dense(), 8 << 30, profile='gtx1080'):,}"[:5] in alt
    )
    too_long = explore.compared(
        Choice("dense", seq_len="16K", profile="gtx1080", batch=64)
    )
    assert {line[5].text for line in too_long.rows} == {"no"}


# --------------------------------------------------------------------------------------
# what cannot be

REFUSED = [
    (
        {"kind": "dilated", "segment_lengths": "2048, x"},
        "each of segment_lengths must be a whole number, as 131072, 128K, 1M or 1e6, got 'x'",
    ),
    (
        {"kind": "dilated", "segment_lengths": ""},
        "each of segment_lengths must be a whole number, as 131072, 128K, 1M or 1e6, got ''",
    ),
    (
        {"kind": "dilated", "dilation_rates": "1"},
        "segment_lengths and dilation_rates differ in length: 2 and 1",
    ),
    ({"seq_len": "long"}, "the length must be a whole number, as 131072, 128K, "),
    ({"seq_len": "1 2"}, "1M or 1e6, got '1 2'"),
    ({"seq_len": "0"}, "seq_len must be a positive integer"),
    ({"seq_len": "2G"}, "must be a positive integer up to 2**35"),
    ({"heads": 7, "kv_heads": 2}, "heads must be a multiple of K/V heads: 7 and 2"),
    ({"ranks": -1}, "ranks must be a positive integer, got -1"),
    (
        {"kind": "bigbird", "seq_len": "64M"},
        "take blocks of at least 65536, or a shorter sequence",
    ),
    (
        {"kind": "bigbird", "block_size": 0},
        "block_size must be a positive integer up to 2**40, got 0",
    ),
]


@pytest.mark.parametrize("changed, said", REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_one_line(changed, said):
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        Choice(**changed).estimate()
    assert "\n" not in str(refused.value)


def test_the_call_as_code_runs():
    for kind in NAMED:
        choice = Choice(
            kind, seq_len="128", ranks=2, passes="fwd+bwd", causal=True, **SMALL
        )
        names = {}
        exec(explore.code(choice), names)
        assert names["pattern"] == choice.pattern and names["q"].grad.shape == (
            1,
            128,
            4,
            8,
        )


# --------------------------------------------------------------------------------------
# the panel, without a front end


def test_without_ipywidgets_the_figure_and_the_table_are_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    cells = run_in_this_process(NOTEBOOK, None, {}).cells
    figure, table = cells[2].outputs
    assert "lower bounds" in figure.metadata["image/png"]["alt"]
    assert (
        "Variants at 131,072 tokens on NVIDIA GeForce GTX 1080"
        in table.data["text/markdown"]
    )
    shown = cells[3].outputs[0].data["text/plain"]
    assert shown == explore.MISSING and "pip install" in shown


@pytest.fixture
def opened(monkeypatch):
    pytest.importorskip("ipywidgets", reason="the explorer needs ipywidgets")
    monkeypatch.setattr(
        explore, "longest", lambda *_, **__: 1 << 20
    )  # of so small heads it is many millions
    explore.over_length.cache_clear()
    yield explore.explorer(
        "gtx1080",
        kind="dilated",
        seq_len="512",
        **SMALL | {"segment_lengths": "64 512"},
    )
    explore.over_length.cache_clear()  # of figures with that length


def change(panel, **controls) -> str:
    """The page once these controls have these values."""
    for name, value in controls.items():
        panel.controls[name].value = value
    return panel.page.value


def test_the_page_follows_the_controls(opened):
    def visible():
        each = opened.controls.items()
        return {name for name, control in each if control.layout.display != "none"}

    bundle, figures = opened._repr_mimebundle_(), plt.get_fignums()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "segment_lengths" in visible()
    assert not {"before", "scheme", "layout"} & visible()
    assert "Nothing is sent" in opened.page.value
    pages = [
        opened.page.value,
        change(opened, ranks=2),
        change(opened, profile="h100", dtype="bfloat16"),
        change(opened, kind="bigbird"),
        change(opened, passes="fwd+bwd", scheme="ulysses"),
    ]
    assert len({*pages}) == 5 and not any('role="alert"' in x for x in pages)
    for text in ("Sent between 2 ranks by ring", "What head 0 of", "Peak memory of a"):
        assert text in pages[1]
    assert "NVIDIA H100" in pages[2] and "by ulysses" in pages[4]
    assert {"random", "block_size", "scheme", "layout"} <= visible()
    assert "segment_lengths" not in visible()
    assert plt.get_fignums() == figures, "all are closed"


def test_the_views(opened):
    shown = change(opened, kind="window", before=8, view=explore.COMPARE)
    assert "Variants at 512 tokens" in shown and "Estimate for" not in shown
    assert "lower bounds" in alts(shown)
    assert "Variants at 65,536 tokens" in change(opened, seq_len="64K")
    assert opened.choice.n == 2**16


def test_advice_is_that_of_advise(opened):
    shape = {name: getattr(Choice(), name) for name in ("heads", "kv_heads")}
    call = {"seq_len": "8K", "passes": "fwd+bwd", "view": explore.ADVICE}
    said = unescape(change(opened, **call, **shape))
    found = advise("gtx1080", 8192, head_dim=8, passes="fwd+bwd")
    assert found.text() in said and found.code() in said
    assert found.text() not in unescape(change(opened, seq_len="16K"))


def test_bad_input_is_one_line_and_nothing_of_another_choice_stays(opened):
    for name, bad, good in (("segment_lengths", "32, ?", "32 64"), ("at", "4096", "0")):
        said = change(opened, **{name: bad})
        assert 'role="alert"' in said and "Traceback" not in said
        assert said.count("<p") == 1 and "<figure" not in said and "<table" not in said
        shown = change(opened, **{name: good})
        assert "role=" not in shown.split("<figure")[0] and "Estimate for" in shown


def test_messages_in_two_threads_end_with_the_last_state(opened, monkeypatch):
    """As JupyterLab and ipykernel 7 send them: a mistake is made while another thread
    still draws what was chosen before.
    """
    seen, drawing, mended = explore.seen, threading.Event(), threading.Event()

    def slow(choice):
        drawing.set()
        mended.wait(0.5)
        return seen(choice)

    monkeypatch.setattr(explore, "seen", slow)
    first = threading.Thread(target=change, args=(opened,), kwargs={"seq_len": "1K"})
    first.start()
    assert drawing.wait(60)
    opened.controls["segment_lengths"].value = "32, ?"
    mended.set()
    first.join()
    assert 'role="alert"' in opened.page.value and "<figure" not in opened.page.value


# --------------------------------------------------------------------------------------
# in a browser

CONTROL = """(label) => [...document.querySelectorAll('.jupyter-widgets')].find(
    (w) => w.querySelector('label')?.textContent === label)?.querySelector('select, input')"""
SET = f"""((label, value) => {{
    const control = ({CONTROL})(label);
    control.value = value;
    control.dispatchEvent(new Event('change', {{bubbles: true}}));
}})"""
ALTS = """[...document.querySelectorAll('.jp-OutputArea figure svg, .jp-OutputArea .caption')].map(
    (x) => x.getAttribute('aria-label') || x.textContent).join(' | ')"""
ADVICE = "[...document.querySelectorAll('.jp-OutputArea pre')].map((t) => t.innerText).join(' | ')"
WRONG = "document.querySelectorAll('.jp-OutputArea [data-mime-type*=error], [data-mime-type*=stderr]').length"


@pytest.mark.slow
def test_the_explorer_in_a_browser(tmp_path):
    """JupyterLab as `make lab` opens it: run all cells, change controls, make a
    mistake, mend it, ask for advice.
    """
    pytest.importorskip("ipywidgets", reason="the explorer needs ipywidgets")
    command = browser()
    with (
        jupyterlab(tmp_path, NOTEBOOK) as url,
        chromium(command, tmp_path, url) as page,
    ):
        page.until(
            "typeof jupyterapp !== 'undefined' && !!document.querySelector('.jp-Notebook')",
            60,
        )
        page.until(
            "!!jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel", 60
        )
        page.js("jupyterapp.commands.execute('notebook:run-all-cells'); 1", wait=False)
        page.until(f"!!({CONTROL})('pattern')", 60)
        page.until(
            f"({ALTS}).includes('What head 0 of 8 sees: dilated [2048, 4096, 8192')"
        )

        def choose(label, value, shows):
            page.js(f"{SET}({label!r}, {value!r})")
            page.until(f"({ALTS}).includes({shows!r})")

        choose("length n", "8K", "n = 8,192")
        choose("ranks", 2, "Sent between 2 ranks")
        choose("hardware", "gtx1080", "What head 0 of 8 sees")
        choose("pattern", "dense", "sees: dense, n = 8,192")
        page.js(f"{SET}('length n', '1 kilo')")
        page.until(
            "document.querySelector('.jp-OutputArea [role=alert]')?.textContent.includes('kilo')"
        )
        page.until(f"({ALTS}) === ''")
        choose("length n", "1K", "sees: dense, n = 1,024")
        assert not page.js("!!document.querySelector('.jp-OutputArea [role=alert]')")
        page.js(f"{SET}('show', 'advice')")
        page.until(f"({ADVICE}).includes('2 ranks, 1,024 tokens')")
        assert page.js(WRONG) == 0

"""The explorer: its pictures and numbers, what its controls refuse, and the whole of it
in a real browser.
"""

import sys
import threading
import time
from html import unescape
from pathlib import Path

import pytest
import torch
from browser import browser, chromium, jupyterlab
from reporting import run_in_this_process
from ringlab.cost import format_bytes, format_seconds
from ringlab.estimate import estimate, longest
from ringlab.presets import NAMED
from ringlab.report import explore

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "explore.ipynb"


def values(**changed) -> dict:
    return explore.values_of("gtx1080", "512", 1) | changed


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", NAMED)
def test_the_pattern_is_shown_as_it_is(kind, causal):
    small = {"heads": 4, "kv_heads": 2, "block_size": 16, "segment_lengths": "32 64"}
    chosen = values(pattern=kind, causal=causal, seq_len="150", **small)
    call = explore.call_of(chosen)
    x = torch.arange(40, 104)
    pairs = call.pattern.multiplicity(x, x, n=150, head=3, heads=4, kv_heads=2)
    pairs = pairs.tril() if causal else pairs  # (q, k)
    shown = unescape(explore.seen(call, 3, 40))
    assert f"What head 3 of 4 sees: {call.pattern}" in shown
    assert f"one by one, {int((pairs > 0).sum())} pairs are seen" in shown


def test_one_call_is_that_of_estimate():
    """A million tokens, in many blocks, of which memory does not even hold the inputs."""
    more = {"heads": 16, "kv_heads": 16, "block_size": 64}
    chosen = values(pattern="window", seq_len="1M", **more)
    shown, call = unescape(explore.page(chosen)), explore.call_of(chosen)
    how = {"heads": 16, "profile": "gtx1080"}
    assert f"{longest(call.pattern, 8 << 30, **how):,} tokens" in shown
    found = estimate(call.pattern, seq_len=2**20, **how)
    assert f"{format_bytes(found.peak_bytes)} a rank, which does not" in shown
    assert f"at least {format_seconds(found.bound_s)}" in shown
    assert "<figure" in shown and 'role="alert"' not in shown


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"heads": 0}, "heads must be a positive integer, got 0"),
        ({"heads": 7, "kv_heads": 2}, "multiple of K/V heads: 7 and 2"),
        ({"seq_len": "1 2"}, "got '1 2'"),
        ({"pattern": "dilated", "segment_lengths": "64, x"}, "got 'x'"),
        ({"pattern": "dilated", "dilation_rates": "1"}, "differ in length: 2 and 1"),
        ({"pattern": "bigbird", "block_size": 0}, "block_size must be a positive"),
        ({"head": 8}, "head 8 is none of the 8"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(changed, said):
    shown = unescape(explore.page(values(**changed)))
    assert said in shown and shown.count("<p") == 1 and "\n" not in shown
    assert 'role="alert"' in shown and "<figure" not in shown


def test_without_ipywidgets_the_advice_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    cells = run_in_this_process(NOTEBOOK, None, {}).cells
    shown = cells[2].outputs[0].data["text/html"]
    assert "131,072 tokens" in shown and explore.MISSING in shown


def test_the_page_follows_the_controls_in_any_thread(monkeypatch):
    """As JupyterLab and ipykernel 7 send them: a mistake is made while another thread
    still draws what was chosen before.
    """
    pytest.importorskip("ipywidgets", reason="the explorer needs ipywidgets")
    _, box, page = explore.explorer("gtx1080", "512", 1).children
    controls = {x.description: x for x in box.kwargs_widgets}
    assert controls["before"].layout.display == "none" and "<figure" in page.value
    controls["pattern"].value = "window"
    assert controls["before"].layout.display is None and "window 2" in page.value
    seen, drawing = explore.seen, threading.Event()

    def slow(*about):
        drawing.set()
        time.sleep(0.5)
        return seen(*about)

    monkeypatch.setattr(explore, "seen", slow)
    first = threading.Thread(target=setattr, args=(controls["seq_len"], "value", "1K"))
    first.start()
    assert drawing.wait(60)
    controls["before"].value = -1
    first.join()
    assert 'role="alert"' in page.value and "<figure" not in page.value


# --------------------------------------------------------------------------------------
# in a browser

CONTROL = """(label) => [...document.querySelectorAll('.jupyter-widgets')].find(
    (w) => w.querySelector('label')?.textContent === label)?.querySelector('select, input')"""
SET = f"""((label, value) => {{
    const control = ({CONTROL})(label);
    control.value = value;
    control.dispatchEvent(new Event('change', {{bubbles: true}}));
}})"""
TEXT = "document.querySelector('.jp-OutputArea .ringlab-explore')?.innerText"
WRONG = "document.querySelectorAll('.jp-OutputArea [data-mime-type*=error], [data-mime-type*=stderr]').length"


@pytest.mark.slow
def test_the_explorer_in_a_browser(tmp_path):
    """JupyterLab as `make lab` opens it: run all cells, change controls, make a
    mistake, mend it, ask for advice.
    """
    pytest.importorskip("ipywidgets", reason="the explorer needs ipywidgets")
    command = browser()
    server = jupyterlab(tmp_path, NOTEBOOK)
    with server as url, chromium(command, tmp_path, url) as page:
        page.until(
            "!!window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
        )
        page.js("jupyterapp.commands.execute('notebook:run-all-cells'); 1", wait=False)
        for label, value, said in (
            ("position", 0, "What head 0 of 8 sees: dilated [2048, 4096, 8192"),
            ("seq_len", "8K", "n = 8,192"),
            ("ranks", 2, "2 ranks by"),
            ("profile", "h200", "141 GiB"),
            ("pattern", "dense", "sees: dense, n = 8,192"),
            ("seq_len", "1 kilo", "got '1 kilo'"),
            ("seq_len", "1K", "sees: dense, n = 1,024"),
            ("show", "advice", "2 ranks, 1,024 tokens"),
        ):
            page.until(f"!!({CONTROL})({label!r})")
            page.js(f"{SET}({label!r}, {value!r})")
            page.until(f"({TEXT}).includes({said!r})")
        assert page.js(WRONG) == 0

"""The page of quality: means and intervals over seeds, what is called noise, reach,
times; made-up rows.
"""

import functools
import json
import math

import analysis
import pytest
import trainings
from reporting import CPU, run_in_this_process, write_two_rows
from ringlab import hardware, measure
from ringlab.measure import suites
from ringlab.report import driver, theme
from tasks import distances
from train import SIZES, Run

ENDS = {
    "recall": [8, 16, 32, 64, 128, 256, 508],
    "copy": [16, 32, 64, 128, 256, 508],
    "lists": [16, 512],
    "text": [64],
}
ORIGIN = {
    "device": "cpu",
    "code": "1",
    "torch": "2",
    "device_name": "a CPU",
    "utc": "2026-01-01T00:00:00Z",
    "text": {"train": "a", "held out": "b"},
    "threads": 2,
}
FAR = {
    "Dense": 508,
    "Window": 64,
    "LongNet and window": 508,
}  # up to where a pattern recalls
BITS = {"Dense": 2.0, "Window": 2.5, "LongNet and window": 2.01}


def trained(task: str, pattern: str, seed: int, status: str = "ok") -> dict:
    definition = {"task": task, "pattern": pattern, "seed": seed, "sizes": {}}
    noise, scores, tokens = 0.02 * (seed - 1), [], 0
    for seq, batch, steps in SIZES["cpu"].phases[task]:
        tokens += seq * batch * steps
        far = {
            str(end): [1.0, 0.9 + noise if end <= FAR[pattern] else 0.1, 100]
            for end in ENDS[task]
        }
        bits = (
            BITS[pattern]
            + noise
            + (0.02 * (seed - 1) if pattern == "LongNet and window" else 0)
        )
        scores.append(
            {
                "tokens": tokens,
                "ended": True,
                "seq": seq,
                "bits": bits,
                "accuracy": 0.5 + noise,
                "by_distance": far,
            }
        )
    row = {
        "kind": "trained",
        "id": f"{task}{pattern}{seed}",
        "origin": ORIGIN,
        "definition": definition,
    }
    return row | {
        "status": status,
        "reason": "" if status == "ok" else "gone",
        "scores": scores,
        "cpu_s": 1.0,
    }


def timed(pattern: str, seq: int, batch: int, each: float) -> dict:
    row = {
        "kind": "timed",
        "id": f"{pattern}{seq}",
        "origin": ORIGIN,
        "task": "text",
        "pattern": pattern,
        "seq": seq,
    }
    return row | {"batch": batch, "seconds": [each * seq * batch] * 7}


def made_up() -> list[dict]:
    found = [trained(task, p, seed) for seed in range(3) for task in ENDS for p in BITS]
    each = {"Dense": 3e-4, "Window": 1e-4, "LongNet and window": 2e-4}
    phases = SIZES["cpu"].phases["text"]
    return found + [
        timed(p, seq, batch, each[p]) for p in BITS for seq, batch, _ in phases
    ]


def one_seed() -> list[dict]:
    rows = made_up()
    return [r for r in rows if r["kind"] == "timed" or not r["definition"]["seed"]]


def behind() -> list[dict]:
    """Dense is behind on text, and one training of the window has no result."""
    rows = made_up()
    for row in rows:
        if row["id"].startswith("textDense"):
            for i, score in enumerate(row["scores"]):
                score["bits"] += 0.6 + 0.1 * i
        if row["id"] == "textWindow0":
            row |= {"status": "diverged", "reason": "the loss is nan"}
    return rows


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What the notebook shows of some rows: (its outputs as Markdown, its names)."""

    @functools.cache
    def shown(rows) -> tuple[str, dict]:
        folder, names = tmp_path_factory.mktemp("rows"), {}
        lines = [json.dumps(row) + "\n" for row in rows()]
        (folder / trainings.NAME).write_text("".join(lines))
        given = {"profile": "cpu", "data": str(folder)}
        source = driver.notebook_of("quality")
        notebook = run_in_this_process(source, None, given, names=names)
        outputs = [o.data for c in notebook.cells for o in c.get("outputs", ())]
        return "\n".join(data.get("text/markdown", "") for data in outputs), names

    return shown


def table(text: str, caption: str) -> dict[str, list[str]]:
    """The rows of a Markdown table by their first cell."""
    lines = text.partition(f"**{caption}**")[2].lstrip().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2 : lines.index("")]]
    return {row[0]: row for row in rows}


def test_the_finding(page):
    text, _ = page(made_up)
    use, recall, bits, trust = text.splitlines()[:7:2]
    near, far = (
        "look up what stands up to 32 tokens back",
        "look up what stands 33 to 508 tokens back",
    )
    assert (
        f"Window to {near}, to copy strings" in use
        and "work out nested lists; LongNet and window to" in use
    )
    assert use.index(far) > use.index("LongNet and window"), (
        "the fastest of those that reach all"
    )
    assert "source code" not in use, "the schedule of lengths decides there"
    assert (
        "Dense, LongNet and window up to 508 tokens; Window up to 64 tokens" in recall
    )
    assert "dense attention reaches 2.00 bits a byte at 4,096 tokens" in bits
    assert "within noise of it: LongNet and window; worse: Window (+0.500 ± 0)" in bits
    assert f"{len(BITS) * 4 * 3} of 135 trainings, 3 seeds" in trust


def test_what_is_not_told_apart_from_the_best(page):
    text, names = page(made_up)
    found = {need.words: need.not_beaten for need in names["needs"]}
    assert found["look up what stands 33 to 128 tokens back"] == [
        "Dense",
        "LongNet and window",
    ]
    assert sorted(found["predict source code in 4,096 tokens"]) == [
        "Dense",
        "LongNet and window",
    ]
    assert len(found["work out nested lists"]) == 3
    far = table(text, "By what a task needs")[
        "look up what stands 129 to 508 tokens back"
    ]
    assert far[1].startswith("Dense: 90.0 %") and far[2] == "LongNet and window"
    assert all(cell.startswith("LongNet and window (") for cell in far[3:]), (
        "of the two, it trains faster and needs less cache"
    )
    assert "One seed tells no difference" in page(one_seed)[0]


def with_moba() -> list[dict]:
    rows = [trained("recall", "Window", seed) for seed in range(3)]
    rows.append(trained("text", "Window", 0))
    for row in rows:
        row["definition"] |= {"pattern": "MoBA"}
        row["id"] += "MoBA"
    return made_up() + rows


def test_what_models_learned_with_selected_keys_is_said_beside_others(page):
    text, _ = page(with_moba)
    line = next(x for x in text.splitlines() if x.startswith("**Selected keys**"))
    recall, bits = line.split("; Bits a byte of text in 4,096 tokens: ")
    assert "recall in 512 tokens (%): MoBA 50.0 (± 5.0), NSA not trained, " in recall
    assert recall.endswith(
        "Dense 50.0 (± 5.0), Window 50.0 (± 5.0), LongNet not trained"
    )
    assert bits.startswith("MoBA 2.48 (one seed), NSA not trained, DSA not trained, ")
    cells = table(text, "Quality and cost")["MoBA"]
    assert cells[2:4] == ["–", "–"] and cells[8] == "–", "no cache is there for it"
    assert "**Selected keys**" not in page(made_up)[0]


def test_intervals_are_those_of_student(page):
    mean, half = analysis.mean_and_half([1.98, 2.0, 2.02])
    assert mean == pytest.approx(2.0)
    assert half == pytest.approx(4.302653 * 0.02 / math.sqrt(3))
    assert math.isnan(analysis.mean_and_half([2.0])[1])
    text, names = page(one_seed)
    assert names["text_line"].endswith("; one seed."), "it tells no difference"
    assert "±" not in text.partition("**Quality and cost**")[2]


def test_what_layers_connect_is_what_a_window_reaches():
    def connected(pattern: str):
        layers = Run("recall", pattern, 0, SIZES["cpu"]).layers(512)
        return analysis.connected(layers, 4, 512, distances(512, 8))

    found = connected("Window")
    assert found[128] == 1 and found[508] == 0 and 0 < found[256] < 0.2, (
        "four layers of 32 to 48 keys"
    )
    assert set(connected("Dense").values()) == {1.0}
    assert connected("Adaptive") is None


def test_seconds_are_tokens_times_the_time_of_a_step(page):
    text, names = page(made_up)
    total = sum(n * b * s for n, b, s in SIZES["cpu"].phases["text"])
    learned = names["learned"]
    last = learned[learned.pattern == "Window"].iloc[-1]
    assert (last.tokens, last.seconds, last.bits) == (
        total,
        pytest.approx(1e-4 * total),
        pytest.approx(2.5),
    )
    cells = table(text, "Quality and cost")
    assert [cells["Dense"][6], cells["Window"][7]] == ["300", "100"], (
        "microseconds a token"
    )
    assert cells["Window"][8] == "166 KiB"


def test_a_training_without_a_result_is_listed_and_counts_in_no_mean(page):
    text, names = page(behind)
    assert names["source"].loc["Window"].notna().sum() == 2
    lost = table(text, "1 trainings have no result")["text"]
    assert lost[1:3] == ["Window", "0"] and "the loss is nan" in lost[4]
    assert "no result" not in page(made_up)[0]


def test_why_dense_falls_behind_is_said_where_it_does(page):
    caption = "Text: bits a byte of Dense above those of Window"
    assert caption not in page(made_up)[0], "dense is ahead"
    found = table(page(behind)[0], caption)
    assert found["64"] == ["64", "+0.100", "+0.100"]
    assert found["16,384"] == ["16,384", "+0.500", "+0.500"]


def test_the_page_is_made_only_where_models_were_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "run", lambda *a, **k: [])
    asked = []
    monkeypatch.setattr(driver.Pages, "_render", lambda pages, *_: asked.append(pages))
    write_two_rows(tmp_path)
    for there in (False, True):
        if there:
            path = tmp_path / "cpu" / "data" / trainings.NAME
            path.write_text("".join(json.dumps(row) + "\n" for row in made_up()))
        driver.run("cpu", reports=tmp_path, machine=CPU)
        stems = [source.stem for source in asked.pop().notebooks]
        assert ("quality" in stems) == there


def test_a_pattern_has_one_color_on_all_pages():
    methods = suites.selecting_systems(hardware.get_profile("cpu"))
    names = {*suites.landscape_systems(), *methods, *analysis.PATTERNS}
    assert names <= {*theme.PATTERNS} and {*theme.PATTERNS.values()} <= {*theme.SERIES}

"""The page of quality: means and intervals over seeds, what is called noise, reach,
times; made-up rows.
"""

import json
import math

import pytest
from reporting import run_in_this_process
from ringlab import hardware
from ringlab.measure import learning, quality
from ringlab.report import driver, first_screen
from ringlab.report.documents import quality as document

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
    for seq, batch, steps in learning.SIZES["cpu"].phases[task]:
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


@pytest.fixture
def rows() -> list[dict]:
    found = [trained(task, p, seed) for seed in range(3) for task in ENDS for p in BITS]
    each = {"Dense": 3e-4, "Window": 1e-4, "LongNet and window": 2e-4}
    phases = learning.SIZES["cpu"].phases["text"]
    return found + [
        timed(p, seq, batch, each[p]) for p in BITS for seq, batch, _ in phases
    ]


def test_the_finding(rows):
    use, recall, text, trust = document.answer(document.Quality(rows)).lines
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
    assert (
        "predict source code in 4,096 tokens" in use[use.index("LongNet and window") :]
    ), "Window is worse there"
    assert (
        "Dense, LongNet and window up to 508 tokens; Window up to 64 tokens" in recall
    )
    assert "dense attention reaches 2.00 bits a byte at 4,096 tokens" in text
    assert "within noise of it: LongNet and window; worse: Window (+0.500 ± 0)" in text
    assert f"{len(BITS) * 4 * 3} of 120 trainings, 3 seeds" in trust


def test_what_is_not_told_apart_from_the_best(rows):
    q = document.Quality(rows)
    found = {need.words: document.not_beaten(q, need) for need in document.needs(q)}
    assert found["look up what stands 33 to 128 tokens back"] == [
        "Dense",
        "LongNet and window",
    ]
    assert sorted(found["predict source code in 4,096 tokens"]) == [
        "Dense",
        "LongNet and window",
    ]
    assert len(found["work out nested lists"]) == 3
    cells = {row[0]: row for row in document.choice(q).rows}
    far = cells["look up what stands 129 to 508 tokens back"]
    assert [far[1].text, far[2]] == ["Dense: 90.0 %", "LongNet and window"]
    assert far[3].text == far[4].text == "LongNet and window", (
        "of the two, it trains faster and needs less cache"
    )
    one = document.Quality(
        [r for r in rows if r["kind"] == "timed" or not r["definition"]["seed"]]
    )
    assert "One seed tells no difference" in document.choice(one).lines[0]


def test_intervals_are_those_of_student(rows):
    found = document.Quality(rows).score("text", "Dense", lambda s: s["bits"])
    assert found.value == pytest.approx(2.0) and found.half == pytest.approx(
        4.302653 * 0.02 / math.sqrt(3)
    )
    one = document.Quality(
        [r for r in rows if r["kind"] == "timed" or not r["definition"]["seed"]]
    )
    assert one.score("text", "Dense", lambda s: s["bits"]).half is None
    assert document.lines(one)[-1].endswith("; one seed."), "it tells no difference"


def test_what_layers_connect_is_what_a_window_reaches():
    found = document.connected("cpu", "recall", "Window")
    assert found[128] == 1 and found[508] == 0 and 0 < found[256] < 0.2, (
        "four layers of 32 to 48 keys"
    )
    assert set(document.connected("cpu", "recall", "Dense").values()) == {1.0}
    assert document.connected("cpu", "recall", "Adaptive") is None


def test_seconds_are_tokens_times_the_time_of_a_step(rows):
    q, total = (
        document.Quality(rows),
        sum(n * b * s for n, b, s in learning.SIZES["cpu"].phases["text"]),
    )
    *_, (tokens, seconds, bits) = q.learned("Window")
    assert (tokens, seconds, bits) == (
        total,
        pytest.approx(1e-4 * total),
        pytest.approx(2.5),
    )
    cells = {row[0]: row for row in document.frontier(q).rows}
    assert [cells["Dense"][6], cells["Window"][7]] == ["300", "100"], (
        "microseconds a token"
    )
    assert cells["Window"][8] == "146 KiB"


def test_a_training_without_a_result_is_listed_and_counts_in_no_mean(rows):
    lost = [
        r | {"status": "diverged", "reason": "the loss is nan"}
        if r["id"] == "textWindow0"
        else r
        for r in rows
    ]
    q = document.Quality(lost)
    assert len(q.trained("text", "Window")) == 2 and document.failures(q).rows[0][
        :3
    ] == ["text", "Window", "0"]
    assert document.failures(document.Quality(rows)) is None


def test_why_dense_falls_behind_is_said_where_it_does(rows):
    assert document.growing(document.Quality(rows)) is None, "dense is ahead"
    for r in rows:
        if r["id"].startswith("textDense"):
            for i, score in enumerate(r["scores"]):
                score["bits"] += 0.6 + 0.1 * i
    found = document.growing(document.Quality(rows)).rows
    assert found[0] == [64, "+0.100", "+0.100"] and found[-1] == [
        16384,
        "+0.500",
        "+0.500",
    ]


def test_the_page_is_made_only_where_models_were_trained(rows, tmp_path):
    assert "quality" in driver.REPORTS
    folder = tmp_path / "cpu" / "data"
    folder.mkdir(parents=True)
    (folder / quality.NAME).write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert len(quality.read(folder)) == len(rows)
    study = first_screen.Study(hardware.get_profile("cpu"), [], folder)
    assert first_screen._learned(study)[0].startswith("**What small models learned**")
    assert first_screen._learned(first_screen.Study(study.profile, [], tmp_path)) == []
    names = {}
    given = {"profile": "cpu", "data": str(folder)}
    run_in_this_process(
        driver.home() / "notebooks" / "quality.ipynb", None, given, names=names
    )
    assert names["quality"].patterns == [*BITS]

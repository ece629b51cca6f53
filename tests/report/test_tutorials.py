"""The tutorials run from top to bottom, and what they tell is so."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from reporting import page, run_in_this_process
from ringlab import Dense
from ringlab.measure import provenance, session, timing
from size import size_of
from train import SIZES

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def run(monkeypatch):
    """Run a tutorial with parameters where Jupyter would, and return the names that it
    defines.
    """
    plt.close("all")
    monkeypatch.setattr(
        provenance, "threads", lambda: 1
    )  # tiny work: a second thread only waits
    monkeypatch.setattr(timing, "MAX_SAMPLES", timing.SAMPLES)
    monkeypatch.setattr(
        session.Session, "probe", lambda *_: {}
    )  # rows need no roofline here
    monkeypatch.chdir(FOLDER)

    def run(name: str, **parameters) -> dict:
        names = {}
        run_in_this_process(FOLDER / f"{name}.ipynb", None, parameters, names=names)
        return names

    yield run
    plt.close("all")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_asks_first_and_uses_public_names(path):
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    asked = [i for i, cell in enumerate(cells) if "**Predict" in cell.source]
    assert len(asked) >= 4 and all(cells[i + 1].cell_type == "code" for i in asked), (
        "a number follows each question"
    )
    box = re.search(r'<div class="alert alert-info">.*</div>', text, re.S)
    assert re.findall(r"^\d\. \*\*", box[0], re.M) == ["1. **", "2. **"], (
        "two exercises"
    )
    assert not re.findall(r"(?<![\w.])_[a-z]\w*|\._[a-z]\w*", code), "private names"
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    ours = [
        name for name in linked if "reports/" not in name
    ]  # those are made by each user
    assert [name for name in ours if not (FOLDER / name).exists()] == []


def test_which_attention(run):
    told = run("01-which-attention", short=256)
    assert (
        max(told["errors"].values()) < told["allowed"] and len(plt.get_fignums()) == 2
    )
    costs = told["costs"]
    dense, sparse = costs.loc["dense"], costs.drop("dense")
    assert (sparse["roofline (ms)"] < 0.5 * dense["roofline (ms)"]).all()
    assert (
        abs(sparse["peak memory (MiB)"] / dense["peak memory (MiB)"] - 1) < 0.1
    ).all(), "equal memory"
    most = [longest["fwd"] for longest in told["longest"].values()]
    assert max(most) < 1.1 * min(most), "a sparse pattern buys no length"
    assert told["advice"].fits


def test_measure_it_yourself(run):
    told = run("02-measure-it-yourself", seq_len=256)
    assert (
        told["first"].errors["out"] < told["first"].tolerance["out"]
        and len(told["first"].seconds) >= 6
    )
    assert (
        told["noise_floor"] >= 1 and told["low"] < told["first"].median < told["high"]
    ), "of the last interval"
    # How many samples, and how often, depends on this machine: six are the fewest, and
    # no order is asserted.
    assert all(0 <= told["false_speedups"](count, times=100) <= 1 for count in (3, 30))
    assert {r.point.dtype for r in told["results"].values()} == {"float32", "bfloat16"}
    assert len(told["results"]) == 7 and "dense, twice the length" in told["lines"]


def test_which_attention_learns(run, monkeypatch):
    """With fewer steps and fewer held-out sequences than a reader has, for these take
    most of the time.
    """
    monkeypatch.setitem(SIZES, "cpu", replace(SIZES["cpu"], held_out=1024))
    told = run("06-which-attention-learns", scale=0.02)
    assert told["reach"][128] == 1 and told["reach"][508] == 0, (
        "four layers of three blocks of 16"
    )
    assert [*told["recall"].index] == [*told["reach"]] == [*told["counts"].index]
    assert (
        told["trained"]["losses"][-1] < told["trained"]["losses"][0]
        and len(plt.get_fignums()) == 1
    )


def test_ranks(run):
    told = run("03-ranks", seq_len=1024)
    assert max(told["differences"].values()) < 1e-5
    counted = told["counted"]
    inside, across = (
        counted["dilated, inside a shard"],
        counted["dilated, across shards"],
    )
    assert (
        inside["plan"] == inside["ring"] == 0
        and across["ring"] == counted["dense"]["ring"] > 0
    )
    assert 8 * across["plan"] == across["ring"], "a row in eight"
    assert counted["window"]["ring"] == "–"
    sent = told["rows"]
    assert sent["plan"]["sent (MiB)"] < 0.01 * sent["all_gather"]["sent (MiB)"]


def test_read_a_report(run, tmp_path):
    page("002", profile="gtx1080").frame().to_csv(tmp_path / "summary.csv")
    told = run("04-read-a-report", data=str(tmp_path), seq_len=256)
    assert len(told["rows"]) == 55 and told["good"].not_quoted_because.isna().all()
    assert told["growth"]["dense"] == pytest.approx(2, abs=0.3), (
        "dense attention grows as n²"
    )
    said = told["compared"]
    assert "first beside second: " in said.stdout, said.stderr
    assert told["found"].bound_s == pytest.approx(1.177, abs=0.001), (
        "what the page of claims says too"
    )
    assert 225 < told["keys"] < 235


def test_without_a_report_it_says_what_to_do(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="summary.csv: run `make report`"):
        run("04-read-a-report", data=str(tmp_path))


def test_from_other_libraries(run):
    pytest.importorskip("transformers")
    told = run("05-from-other-libraries")
    compared = "sdpa", "packed", "layer", "model"
    assert max(told[f"{name}_difference"] for name in compared) < 1e-5
    assert told["model_rows"] == [127, 512]
    assert told["senders"] == [1, 2], (
        "two documents inside a shard, and no query after the last"
    )
    seen = told["seen"]
    assert sum(seen["torchscale"]) > sum(seen["dilated-attention-pytorch"])
    assert set(told["kept"]["dense"]) == {384} and max(told["kept"]["dilated"]) < 120


def test_in_your_model(run):
    pytest.importorskip("transformers")
    told = run("07-in-your-model", steps=20)
    assert told["difference"] < 1e-5 and told["same_tokens"] == 32
    assert told["apart"] < 1e-5
    assert told["losses"][-1] < 0.5 * told["losses"][0]
    assert (
        told["kept"] < 0.7
        and told["again"].config.ringlab_pattern[-1] == Dense().to_dict()
    )
    assert len(told["new"]) == 32


def test_the_example_of_sharded_training_runs_under_torchrun(tmp_path):
    source = (FOLDER / "train_sharded.py").read_text()
    assert size_of(source)[0] <= 400 and "range(20)" in source
    (tmp_path / "few.py").write_text(source.replace("range(20)", "range(5)"))
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        tmp_path / "few.py",
    ]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"step 4: loss [1-4]\.\d+\n", done.stdout)

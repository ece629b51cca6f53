"""One new position at a time by the kernels of ``decode``: values by Triton's
interpreter, what a step calls, and the device code.
"""

import pytest
from compiled import fits, used
from generated import CALLED
from interpreted import SEEDS, printed
from ringlab.kernels import triton_config

pytest.importorskip("triton")


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """Computed for the whole file, not for its first test."""
    printed("generated")


def test_random_generations_are_the_oracles():
    """Patterns, heads, head_dims, lengths, ranks; NaN where no row is."""
    cases = [found for found in printed("generated").values() if "bound" in found]
    assert len(cases) == SEEDS + 1 and all(found["zeros"] for found in cases)
    assert max(found["bound"] for found in cases) < 5e-3
    assert max(found["out"] for found in cases) <= 1  # of its bound
    assert max(found["lse"] for found in cases) <= 2e-3


@pytest.mark.parametrize("name", CALLED)
def test_a_step_between_two_look_aheads_launches_and_copies_nothing(name):
    """No operator on rows, no number of the device on the host: two launches alone."""
    found = printed("generated")[name]
    assert (found["noted"], found["launches"]) == ([], 2)
    assert found["prepared"] >= 20


@pytest.mark.parametrize("name", [*CALLED, "gap", "one part"])
def test_a_draft_is_a_few_steps_at_once(name):
    """4 query heads of a K/V head that see other rows; two launches where no row
    leaves.
    """
    found = printed("generated")[f"{name}, drafts"]
    assert found["off"] < 2e-6 and len(found["launches"]) >= 4
    if name == "dense":
        assert max(found["launches"]) <= 10  # for 16 positions, 4 at a time in fp32


@pytest.mark.parametrize("name", CALLED)
def test_a_step_in_a_graph_is_replayed_between_other_calls(name):
    """Three launches and a product (q of a negative scale), on tables that are filled
    between replays.
    """
    found = printed("generated")[f"{name}, in a graph"]
    assert found["off"] < 2e-6 and found["same"] and found["runs"] == 4


@pytest.mark.parametrize("name", CALLED)
def test_a_replay_that_was_not_prepared_gives_nan_and_is_told(name):
    found = printed("generated")[f"{name}, in a graph"]
    assert found["nan"] and len(found["why"]) == 2
    assert all("13 steps were replayed for 1 that" in why for why in found["why"])
    assert "call prepare_step()" in found["unprepared"] and found["again"] == 1


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize(
    "dtype, head_dim, seers, bits, rows",
    [
        ("bf16", 128, 1, 1, 32),
        ("bf16", 256, 4, 10, 16),
        ("fp32", 128, 4, 10, 16),
        ("bf16", 64, 4, 10, 64),
        ("fp16", 32, 1, 1, 64),
    ],
)
def test_the_device_code_fits(
    capability, dtype, head_dim, seers, bits, rows, monkeypatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from ringlab.kernels import decode

    kinds = dict.fromkeys(("q", "new_k", "new_v", "k", "v"), f"*{dtype}")
    kinds |= dict.fromkeys(("out", "lse"), "*fp32") | {"scale": "fp32"}
    kinds |= {"shown": "*i16", "table": "*i64", "counter": "*i64", "slots": "i64"}
    kinds |= {f"s_{x}{y}": "i64" for x in "qkv" for y in "bnh"}
    size = 4 if dtype == "fp32" else 2
    cols = decode.columns(triton_config.padded(head_dim), size, rows)
    fixed = {
        "COUNTED": 65,
        "GROUP": 4,
        "ROWS": rows,
        "TABLES": 8,
        "SEERS": seers,
        "BITS": bits,
    }
    fixed |= {"COLS": cols, "DIM": head_dim, "PAD": head_dim, "HALVES": size == 2}
    fixed |= {"PRECISION": "tf32x3" if size == 4 else "tf32", "WHOLE": False}
    found, _ = used(decode.attend, kinds, fixed, capability)
    assert fits(found, capability)

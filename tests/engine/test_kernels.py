import subprocess
import sys
from itertools import product

import pytest
import torch
from doubles import gpu
from refusals import refused
from ringlab import Dense, attention, kernels, native, reference
from ringlab.kernels import KERNELS, Eager, choose, forget_probes, probe, rules
from ringlab.kernels.base import DeviceSpec

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ON_CPU = [Eager(tile_bytes=1 << 14)]
ON_CPU += [KERNELS[name] for name in ("compiled", "cpu_flash", "eager")]


def check(kernel, dtype, m, causal):
    """Attention of m queries and keys is the oracle's, on strided (b, m, h, d)."""
    if why := kernel.refuses(CPU, dtype, 16):
        pytest.skip(why)
    torch.manual_seed(m)
    q, k, v, dout = (
        torch.randn(3, 2 * m, 5, 16).to(dtype)[:, ::2, 1:4] for _ in range(4)
    )
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    ref, ref_lse = reference.attention(*exact, Dense(), causal=causal, scale=0.3)
    want = torch.autograd.grad(ref, exact, dout.double())
    bound = reference.tolerance(q, k, v, dout, causal=causal, scale=0.3)
    out, lse = kernel.forward(q, k, v, causal, 0.3)
    assert (
        out.shape == q.shape
        and out.dtype.itemsize >= dtype.itemsize
        and lse.shape == (3, 3, m)
    )
    assert reference.error(out, ref, 1.0) <= bound["out"]
    assert reference.error(lse, ref_lse, 1.0) <= bound["lse"]
    grads = kernel.backward(dout, q, k, v, out, lse, causal, 0.3)
    floor = reference.gradient_floor(q, k, dout, 0.3)
    for name, got, exact_grad in zip(("dq", "dk", "dv"), grads, want):
        assert reference.error(got, exact_grad, floor) <= bound[name], (name, causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("m", [1, 2, 64, 127, 129, 200])
def test_kernel_equals_the_oracle(kernel, dtype, m):
    for causal in (False, True):
        check(kernel, dtype, m, causal)


def test_a_kernel_offers_what_it_declares():
    for kernel in KERNELS.values():
        declared = kernel.takes_softcap, kernel.whole_patterns
        operations = kernel.with_softcap, kernel.attend
        assert declared == tuple(x != kernel.not_offered for x in operations)
    with refused(NotImplementedError, match="eager does not offer"):
        Eager().attend()


def test_every_refusal_has_a_reason():
    rows = kernels.table("cpu", torch.float32, 64)
    # The last one was never timed.
    assert {name for name, *_ in rows} == set(KERNELS) and rows[-1][0] == "triton"
    here = (
        {"cpu_flash", "eager"}
        if native.library()[1]
        else {"compiled", "cpu_flash", "eager"}
    )  # no compiler
    assert [name for name, *_, chosen in rows if chosen] == [min(here - {"eager"})]
    reasons = {name: why for name, runs, why, _ in rows if not runs}
    assert reasons.keys() == KERNELS.keys() - here
    assert all(why and "\n" not in why for why in reasons.values())
    assert "CUDA" in reasons["cudnn"] and "this is cpu" in reasons["flash"]


def test_chain_reports_what_it_passed_over():
    choice = choose(
        "cpu", torch.float32, 64, backend=("xformers", "efficient", "eager")
    )
    assert choice.name == "eager" and list(choice.refusals) == ["xformers", "efficient"]
    assert choose("cpu", torch.bfloat16, 64, backend="sdpa").name == "cpu_flash"


def test_a_choice_is_made_once_and_arguments_are_still_checked():
    choice = choose(CPU, torch.float32, 64, causal=True)
    assert choose("cpu", torch.float32, 64, causal=True) is choice
    forget_probes()
    assert choose("cpu", torch.float32, 64, causal=True) is not choice
    with pytest.raises(TypeError, match="causal must be True or False, got 1"):
        choose(CPU, torch.float32, 64, causal=1)
    assert choose(CPU, torch.float32, 64, backend=["eager"]).name == "eager"


def test_what_cannot_run_raises_with_the_reason():
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(ValueError, match="unknown backend 'fast'; known: auto, sdpa"):
        attention(q, q, q, Dense(), backend="fast")
    with refused(
        NotImplementedError, match="'cudnn' cannot run on cpu.*needs a CUDA device"
    ):
        attention(q, q, q, Dense(), backend="cudnn")


class Broken(Eager):
    name = "broken"

    def forward(self, q, k, v, causal, scale):
        out, lse = super().forward(q, k, v, causal, scale)
        return out, lse * 1.4427  # base 2


class Crashing(Eager):
    name = "crashing"

    def backward(self, *args):
        raise RuntimeError("no kernel image is available\nfor execution on the device")


def test_probe_finds_wrong_and_failing_kernels(monkeypatch):
    for kernel in (Broken(), Crashing()):
        monkeypatch.setitem(KERNELS, kernel.name, kernel)
    forget_probes()
    ask = CPU, torch.float32, 16, False
    try:
        why = probe("broken", *ask, False)
        assert why.startswith("wrong result: lse is off by 4")
        assert probe("crashing", *ask, False) is None  # its forward is right
        why = probe("crashing", *ask, True)
        assert (
            why
            == "RuntimeError: no kernel image is available for execution on the device"
        )
    finally:
        forget_probes()


def test_order_and_refusals_follow_the_hardware():
    have = (6, 1), (8, 0), (9, 0)
    first = [kernels.order(DeviceSpec("cuda", x))[0] for x in have]
    assert first == ["flash_attn_2", "flash_attn_2", "flash_attn_4"]
    pascal = DeviceSpec("cuda", (6, 1))
    for name in ("flash", "cudnn"):
        assert "8.0 or newer, this is 6.1" in KERNELS[name].refuses(
            pascal, torch.float16, 64
        )
    assert KERNELS["efficient"].refuses(pascal, torch.float32, 64) is None
    assert "bfloat16 from compute capability 8.0" in KERNELS["efficient"].refuses(
        pascal, torch.bfloat16, 64
    )


@pytest.mark.parametrize(
    "have, takes, refuses",
    [
        ((9, 0), (8, 64, 136, 256), (60, 264)),
        ((10, 0), (64, 128, 256), (136, 192)),
        ((12, 0), (64, 128), (136, 256)),
    ],
)
def test_flash_attention_4_takes_the_heads_that_it_has_kernels_for(
    have, takes, refuses
):
    kernel, device = KERNELS["flash_attn_4"], DeviceSpec("cuda", have)
    with gpu(have, "flash_attn_4"):
        for head_dim in takes:
            assert not probe(kernel.name, device, torch.bfloat16, head_dim, True, True)
        for head_dim in refuses:
            assert "head_dim" in kernel.refuses(device, torch.bfloat16, head_dim)
        assert "not float32" in kernel.refuses(device, torch.float32, 64)
    assert "not installed" in kernel.refuses(device, torch.bfloat16, 64)


def test_what_no_package_would_help_is_refused_before_the_package_is_asked_for():
    hopper = DeviceSpec("cuda", (9, 0))
    for name, dtype, head_dim in (
        ("flash_attn_2", torch.float32, 64),
        ("flash_attn_3", torch.float32, 64),
        ("xformers", torch.float64, 64),
        ("xformers", torch.float16, 60),
    ):
        why = KERNELS[name].refuses(hopper, dtype, head_dim)
        assert "not float" in why or "not 60" in why
    assert "at most 128" in KERNELS["cudnn"].refuses(hopper, torch.float16, 136)
    assert KERNELS["flash"].refuses(hopper, torch.float16, 136) is None
    newer = DeviceSpec("cuda", (10, 0))
    assert "9.0, this" in KERNELS["flash_attn_3"].refuses(newer, torch.float16, 64)


PROBED = """
import torch
from ringlab import kernels
pascal = kernels.DeviceSpec("cuda", (6, 1))
print(kernels.probe("xformers", pascal, torch.float32, 64, False, True))
"""


def test_xformers_that_cannot_be_used_warns_of_nothing_and_says_why_in_one_line():
    command = [sys.executable, "-c", PROBED]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.count("\n") == 1, done


# Of runs on an H200: milliseconds of the list kernels and of one merge of the calls of
# cuDNN and of FlashAttention-4, forward and with backward, by (kind of pattern, head_dim,
# causal). 65,536 tokens, 16 heads, bf16.
WAYS = "triton", "cudnn", "flash_attn_4"
ON_H200 = {
    ("branches", 128, False): ((2.78, 13.3), (3.29, 14.3), (3.35, 13.2)),
    ("branches", 128, True): ((2.03, 8.67), (2.02, 8.91), (2.07, 8.19)),
    ("branches", 64, False): ((1.86, 7.71), (2.30, 8.73), (2.07, 7.54)),
    ("branches", 64, True): ((1.64, 5.82), (1.40, 5.81), (1.38, 4.86)),
    ("ladder", 128, False): ((4.10, 18.2), (3.77, 16.5), (4.01, 15.2)),
    ("ladder", 128, True): ((3.08, 12.2), (2.65, 10.7), (2.54, 9.95)),
    ("ladder", 64, False): ((2.41, 10.1), (2.66, 9.93), (2.53, 9.05)),
}


@pytest.mark.parametrize("installed", [(), ("flash_attn_4",)])
@pytest.mark.parametrize("kind, head_dim, causal", ON_H200)
def test_auto_takes_what_was_fastest_within_five_percent(
    kind, head_dim, causal, installed
):
    """Each pass by itself, of what is there."""
    ways = dict(zip((*WAYS[:2], *installed), ON_H200[kind, head_dim, causal]))
    times = {name: (first, both - first) for name, (first, both) in ways.items()}
    how = {"causal": causal, "pattern_kind": kind}
    with gpu((9, 0), *installed):
        for i, gradients in enumerate((False, True)):
            how["for_gradients"] = gradients
            name = choose(CPU, torch.bfloat16, head_dim, **how).name
            assert times[name][i] <= 1.05 * min(each[i] for each in times.values())
    if not installed:  # as a machine without a GPU predicts it
        expected = kernels.expected("cuda", (9, 0), torch.bfloat16, head_dim, **how)
        assert expected.name == name


def test_every_rule_names_its_measurement_and_every_pass_has_a_rule():
    for rule in rules.RULES:
        measured = rule.evidence.startswith("H200, 2026-11-26")
        assert measured == (rule.least == rule.most == (9, 0))
        assert measured or rule.evidence == rules.BY_ANALOGY
        assert rule.kernel is None or rule.kernel in KERNELS
    for have in ((5, 0), (6, 1), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for dtype, kind, causal in product(DTYPES, rules.KINDS, (True, False)):
            rule = rules.rule_for(have, dtype, 64, kind, causal, False)
            dilated = have == (9, 0) and dtype in DTYPES[2:] and not causal
            listed = rules.LISTED if not dilated else rules.KINDS[1:]
            assert rule.way == (
                "lists" if have >= (8, 0) and kind in listed else "calls"
            )

"""Hardware: profile figures and their sources, dtype policy, detection with faked
drivers, install lines, CPU peaks.
"""

import stat
import sys
from dataclasses import replace

import pytest
import torch
from ringlab import hardware
from ringlab.hardware import Gpu, Machine, Probe
from ringlab.hardware.profiles import FOLDER

PROFILES = sys.modules["ringlab.hardware.profiles"]

GIB = 2**30
DEFAULT = "pip install torch==2.13.0"
CU126 = f"{DEFAULT}+cu126 --extra-index-url https://download.pytorch.org/whl/cu126"
CU130_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126_ARCHS = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130_BUILD, CU126_BUILD = (
    ("2.13.0+cu130", "13.0", CU130_ARCHS),
    ("2.13.0+cu126", "12.6", CU126_ARCHS),
)
CPU_BUILD = ("2.13.0+cpu", None, ())
GPUS = "gtx1080 v100 t4 rtx3090 rtx4090 a100 h100 h200".split()  # those of ours

SMI_1080 = {
    "name": "NVIDIA GeForce GTX 1080",
    "compute_cap": "6.1",
    "memory.total": "8192",
    "uuid": "GPU-1234-aa",
    "driver_version": "580.65.06",
    "clocks.max.sm": "1911",
}
GTX1080 = Gpu("NVIDIA GeForce GTX 1080", (6, 1), 8113 * 2**20, "580.65.06", 1.911e9)


def machine(*gpus, device="cuda", **fields):
    fields = {
        "torch": "2.13.0+cu130",
        "torch_cuda": "13.0",
        "arch_list": CU130_ARCHS,
        "cpu_model": "a CPU",
    } | fields
    return Machine(device=device, gpus=gpus, **fields)


class FakeProbe(Probe):
    """A machine on paper: smi is the text per field or None, opened what torch opens,
    files a path -> text dict.
    """

    def __init__(self, smi=None, opened=(), build=CU130_BUILD, files=None, error=None):
        self.smi, self.opened, self.build, self.files, self.error = (
            smi,
            list(opened),
            build,
            files or {},
            error,
        )

    def nvidia_smi(self, fields):
        return (
            None if self.smi is None else ", ".join(self.smi[f] for f in fields) + "\n"
        )

    def torch_says(self):
        return self.opened, dict(
            zip(("torch", "torch_cuda", "arch_list"), self.build),
            torch_error=self.error,
        )

    def read(self, path):
        return self.files.get(path)

    def affinity(self):
        return {0, 1, 2, 3}


@pytest.fixture(autouse=True)
def no_gpu_is_hidden(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# ---- profiles


@pytest.mark.parametrize("name", GPUS)
def test_profile_is_consistent(name):
    p = hardware.get_profile(name)
    fp32, half = p.flops["float32"], p.flops["float16"]
    assert 4 < fp32 / p.bandwidth_bytes_per_s < 100, (
        "fp32 FLOP per byte of memory traffic"
    )
    assert 20 < p.peak(p.default_dtype()) / p.bandwidth_bytes_per_s < 350, (
        "FLOP per byte at the default dtype"
    )
    # Dense tensor cores give at most 16 times the fp32 rate on any of these cards, 2 on
    # GeForce; sparse figures double.
    assert half / fp32 <= (2.01 if "GeForce" in p.title else 16.01)
    assert not set(p.flops.values()) & {
        624e12,
        1979e12,
        1978.9e12,
        284e12,
        285e12,
        330.3e12,
        661e12,
    }
    assert (p.flops["bfloat16"] is None) == (p.capability < (8, 0))
    assert ("tf32" in p.flops) == (p.capability >= (8, 0))
    if p.flops["bfloat16"] is not None:
        assert p.flops["bfloat16"] == half and fp32 <= p.flops["tf32"] <= half
    if not hardware.has_tensor_cores(p.capability):
        assert half == pytest.approx(fp32 / 64, rel=1e-3), (
            "GTX 1080, the only one without"
        )
    cores = {
        "gtx1080": 2560,
        "v100": 5120,
        "t4": 2560,
        "rtx3090": 10496,
        "rtx4090": 16384,
        "a100": 6912,
    }.get(name)
    if cores:
        assert fp32 == pytest.approx(cores * 2 * p.clock_hz, rel=5e-3)
    assert hardware.runs(
        CU126_ARCHS if hardware.install_line(p.capability) == CU126 else CU130_ARCHS,
        p.capability,
    )
    assert p.links["pcie"] in (15.75e9, 31.5e9, 63e9)
    assert (
        "nvlink" not in p.links
        or p.links["pcie"] < p.links["nvlink"] < p.bandwidth_bytes_per_s
    )


def test_profiles_are_found_by_name():
    for name in ("GTX1080", "gtx-1080", "GTX 1080"):
        assert hardware.resolve(name, machine()).name == "gtx1080"
    with pytest.raises(
        hardware.UnknownProfile,
        match=r"^unknown profile 'zzz'; known: auto, cpu, gtx1080.*generic$",
    ):
        hardware.resolve("zzz", machine())


T4 = (FOLDER / "t4.toml").read_text().replace('"t4"', '"x"').replace("T4$", "X4$")


@pytest.mark.parametrize(
    "old, new, key",
    [
        (T4, "name = ", "Invalid value"),
        (T4, 'name = "x"', "title: is missing"),
        (T4, "variant = [5]\n" + T4, "variant: "),
        ("title =", "titel =", "titel: no such key"),
        ('title = "NVIDIA T4"', "title = 4", "title: "),
        ('"x"', '"y"', "name: must be 'x'"),
        ('"cuda"', '"gpu"', "kind: "),
        ("X4$", "(", "match: "),
        ("[13, 17]", "5", "memory_gib: "),
        ("[7, 5]", "[7.5]", "capability: "),
        ("[7, 5]", "[8, 0]", "flops.tf32: is missing"),
        ("value = 4_194_304", 'value = "much"', "l2_bytes: 'much' is no number"),
        ("value = 4_194_304", "value = nan", "l2_bytes: "),
        ("value = 4_194_304", "size = 4_194_304", "l2_bytes: "),
        ("[capability]", "[flops]\nfloat32 = 5\n[capability]", ""),
        ("[flops.float16]", "[flops.half]", "flops.float16: is missing"),
        ("[links.pcie]", "[links.nvlink]", "links.pcie: is missing"),
        ("https:", "see ", "capability: its source"),
    ],
)
def test_a_file_that_is_no_profile_is_one_line_and_breaks_no_other(
    tmp_path, monkeypatch, capsys, old, new, key
):
    monkeypatch.setattr(PROFILES, "FOLDER", tmp_path)
    monkeypatch.setattr(PROFILES, "profiles", PROFILES.profiles.__wrapped__)
    path = tmp_path / "x.toml"
    for name in ("t4", "cpu"):
        (tmp_path / f"{name}.toml").write_text((FOLDER / f"{name}.toml").read_text())
    path.write_text(T4)
    assert hardware.get_profile("x").capability == (7, 5) and old in T4
    path.write_text(T4.replace(old, new))
    with pytest.raises(hardware.UnknownProfile) as refused:
        hardware.get_profile("x")
    assert f"x.toml is no profile: {key}" in str(refused.value)
    assert (
        hardware.get_profile("t4").name == "t4" and hardware.match(Machine()) == "cpu"
    )
    assert all(str(refused.value) in x for x in capsys.readouterr().err.splitlines())


def test_peak_is_the_rate_of_the_arithmetic_that_runs():
    p, h100 = hardware.get_profile("gtx1080"), hardware.get_profile("h100")
    assert p.peak("float16") == p.peak("bfloat16") == p.peak(torch.float32) == 8.873e12
    assert hardware.get_profile("v100").peak("bfloat16") == 15.7e12
    assert h100.peak(torch.bfloat16) == 989.4e12 and h100.peak("float64") is None
    assert (
        hardware.get_profile("cpu").peak("float16")
        is hardware.get_profile("generic").peak("float16")
        is None
    )
    assert p.peak("float32", machine(GTX1080)) == pytest.approx(
        8.873e12 * 1.911 / 1.733
    ), "a clock above the sheet's"
    assert (
        p.peak("float32", machine(replace(GTX1080, clock_max_hz=1.2e9)))
        == p.peak("float32", machine())
        == 8.873e12
    )


# ---- dtype policy


@pytest.mark.parametrize(
    "dtype, capabilities",
    [
        (torch.float32, [None, (3, 5), (5, 2), (6, 1)]),
        (torch.float16, [(5, 3), (6, 0), (6, 2), (7, 0), (7, 5)]),
        (torch.bfloat16, [(8, 0), (8, 10), (9, 0), (99, 0)]),
    ],
)
def test_default_dtype(dtype, capabilities):
    for capability in capabilities:
        assert hardware.default_dtype(capability) is dtype, capability
        reason = hardware.dtype_reason(capability)
        assert (
            reason.startswith(str(dtype).removeprefix("torch.") + ":")
            and "\n" not in reason
        )


# ---- matching


CARDS = {
    "gtx1080": [
        ("NVIDIA GeForce GTX 1080", (6, 1), 7.92),
        ("GeForce GTX 1080", (6, 1), 8),
    ],
    "v100": [
        ("Tesla V100-SXM2-16GB", (7, 0), 15.8),
        ("Tesla V100-SXM2-32GB", (7, 0), 31.7),
    ],
    "t4": [("Tesla T4", (7, 5), 14.75)],
    "rtx3090": [("NVIDIA GeForce RTX 3090", (8, 6), 23.7)],
    "rtx4090": [("NVIDIA GeForce RTX 4090", (8, 9), 23.6)],
    "a100": [
        ("NVIDIA A100-SXM4-80GB", (8, 0), 79.3),
        ("NVIDIA A100 80GB PCIe", (8, 0), 79.3),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 39.5),
    ],
    "h100": [("NVIDIA H100 80GB HBM3", (9, 0), 79.1)],
    "h200": [("NVIDIA H200", (9, 0), 139.8), ("NVIDIA H200", None, None)],
    "generic": [
        ("NVIDIA GeForce GTX 1080 Ti", (6, 1), 10.9),
        ("NVIDIA GeForce GTX 1080", (7, 5), 8),
        ("Tesla V100S-PCIE-32GB", (7, 0), 31.7),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6), 23.7),
        ("NVIDIA GeForce RTX 4090 D", (8, 9), 23.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 15.7),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 4.75),
        ("NVIDIA H100 PCIe", (9, 0), 79.1),
        ("NVIDIA H100 NVL", (9, 0), 93.1),
        ("NVIDIA H200 NVL", (9, 0), 139.8),
        ("NVIDIA B200", (10, 0), 178),
    ],
}


@pytest.mark.parametrize("expected", CARDS)
def test_match(expected):
    for name, capability, gib in CARDS[expected]:
        gpu = Gpu(name, capability, None if gib is None else int(gib * GIB))
        assert hardware.match(machine(gpu)) == expected, name
        assert hardware.resolve("auto", machine(gpu)).name == expected


def test_profile_on_this_machine():
    small = hardware.get_profile("a100").on(
        machine(Gpu("NVIDIA A100-SXM4-40GB", (8, 0), int(39.5 * GIB)))
    )
    assert (small.title, small.bandwidth_bytes_per_s) == ("NVIDIA A100 40 GB", 1555e9)
    assert small.memory_bytes == int(39.5 * GIB) and small.flops["float16"] == 312e12
    large = hardware.get_profile("v100").on(
        machine(Gpu("Tesla V100-SXM2-32GB", (7, 0), 32 * GIB))
    )
    assert large.memory_bytes == 32 * GIB
    other = hardware.get_profile("generic").on(
        machine(Gpu("NVIDIA B200", (10, 0), 178 * GIB))
    )
    assert (other.title, other.capability, other.memory_bytes) == (
        "NVIDIA B200",
        (10, 0),
        178 * GIB,
    )
    assert other.default_dtype() is torch.bfloat16 and other.peak("bfloat16") is None
    assert hardware.get_profile("h100").on(Machine()) is hardware.get_profile("h100"), (
        "an absent card keeps its sheet"
    )
    assert (
        hardware.get_profile("cpu").on(Machine(cpu_model="X", ram_bytes=7)).memory_bytes
        == 7
    )


def test_runnable_says_why_in_one_line():
    here = machine(
        GTX1080, torch="2.13.0+cu126", torch_cuda="12.6", arch_list=CU126_ARCHS
    )
    assert hardware.get_profile("gtx1080").runnable(here) == (
        True,
        "NVIDIA GeForce GTX 1080 is here",
    )
    assert (
        hardware.get_profile("generic").runnable(here)[0]
        and hardware.get_profile("cpu").runnable(here)[0]
    )
    ok, why = hardware.get_profile("h100").runnable(here)
    assert not ok and "here is NVIDIA GeForce GTX 1080 (profile gtx1080)" in why
    ok, why = hardware.get_profile("gtx1080").runnable(machine(GTX1080, device="cpu"))
    assert not ok and CU126 in why and "sm_61" in why and "\n" not in why
    ok, why = hardware.get_profile("gtx1080").runnable(Machine(cpu_model="a CPU"))
    assert (ok, why) == (
        False,
        "needs NVIDIA GeForce GTX 1080; no GPU here, only a CPU",
    )


# ---- torch builds


@pytest.mark.parametrize(
    "capability, driver, line",
    [
        *((capability, None, CU126) for capability in [(5, 0), (6, 1), (7, 2)]),
        *(
            (capability, None, DEFAULT)
            for capability in [(7, 5), (9, 0), (99, 0), None]
        ),
        ((8, 6), "550.54.14", CU126),
        ((8, 6), "580.65.06", DEFAULT),
        ((10, 0), "570.1", DEFAULT),  # no CUDA 12.6 kernels beyond Hopper
    ],
)
def test_install_line(capability, driver, line):
    assert hardware.install_line(capability, driver) == line


@pytest.mark.parametrize(
    "archs, capability, ok",
    [
        (["sm_60"], (6, 1), True),
        (["sm_61"], (6, 0), False),
        (["sm_50"], (6, 1), False),
        (["sm_80"], (8, 9), True),
        (["sm_80"], (9, 0), False),
        (["compute_120"], (13, 0), True),
        (["compute_120"], (10, 0), False),
        (["sm_100"], (10, 3), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100f"], (10, 3), True),
        ([], (8, 0), False),
        (["gfx90a"], (9, 0), False),
    ],
)
def test_which_binaries_run(archs, capability, ok):
    assert hardware.runs(archs, capability) is ok


# ---- detection


def test_this_machine():
    m, p = hardware.detect(), hardware.measure_cpu_peaks("bfloat16")
    assert m.cores >= 1 and m.torch == torch.__version__
    assert m.device == ("cuda" if m.gpus and hardware.drivable(m) is None else "cpu")
    assert m.name and m.ram_bytes > 0 and p.cache_bytes == m.cache_bytes
    assert p.flops_per_s > 1e8 and p.bytes_per_s_cache >= p.bytes_per_s_dram > 1e8


OPENED = replace(GTX1080, driver=None, clock_max_hz=None)  # what torch says of it


def test_pascal_with_the_right_wheel():
    m = hardware.detect(FakeProbe(SMI_1080, [OPENED], CU126_BUILD))
    assert (
        m.device == "cuda" and hardware.drivable(m) is None and m.name == GTX1080.name
    )
    assert m.gpus == (GTX1080,)  # name and size from torch, the rest from nvidia-smi
    assert hardware.get_profile(hardware.match(m)).runnable(m)[0]


@pytest.mark.parametrize(
    "smi, profile, how, said",
    [
        (
            {},
            "gtx1080",
            {"opened": [OPENED]},
            [
                CU126,
                "or GPU=cpu",
                "GTX 1080 is sm_61; this torch (2.13.0+cu130) has kernels only for sm_75 sm_80",
            ],
        ),
        (
            {},
            "gtx1080",
            {"build": CPU_BUILD},
            [CU126, "is a CPU build and drives no GPU"],
        ),
        (
            {
                "name": "NVIDIA GeForce RTX 3090",
                "compute_cap": "8.6",
                "driver_version": "550.54.14",
            },
            "generic",
            {"error": "The NVIDIA driver on your system is too old"},
            [CU126, "has driver 550.54.14"],
        ),
        (
            {"name": "NVIDIA B200", "compute_cap": "10.0", "driver_version": "570.10"},
            "generic",
            {},
            ["install: an NVIDIA driver of version 580 or newer"],
        ),
        (
            {"name": "NVIDIA H200", "compute_cap": "9.0", "memory.total": "143771"},
            "h200",
            {"error": "CUDA unknown error"},
            [DEFAULT, "cannot start it: CUDA unknown error"],
        ),
        (
            {"name": "Tesla K80", "compute_cap": "3.7", "memory.total": "[N/A]"},
            "generic",
            {},
            ["no torch 2.13.0 wheel has kernels for sm_37"],
        ),
        (
            {
                "name": "Quadro K1200",
                "compute_cap": "[N/A]",
                "clocks.max.sm": "[Not Supported]",
            },
            "generic",
            {"build": CPU_BUILD},
            [CU126, "a card older than Turing"],
        ),
    ],
)
def test_a_gpu_that_torch_cannot_drive_is_explained_in_one_line(
    smi, profile, how, said
):
    m = hardware.detect(FakeProbe(SMI_1080 | smi, **how))
    line = hardware.drivable(m)
    assert (
        m.device == "cpu"
        and hardware.match(m) == profile
        and len(line.splitlines()) == 1
    )
    assert all(text in line for text in said), line
    assert hardware.drivable(replace(m, gpus=())) is None


@pytest.mark.parametrize(
    "visible, there",
    [("0", 1), ("GPU-12", 1), ("", 0), ("-1", 0), ("7", 0), ("GPU-ffff", 0)],
)
def test_hidden_gpus_are_not_there(monkeypatch, visible, there):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    m = hardware.detect(FakeProbe(SMI_1080))
    assert len(m.gpus) == there and hardware.match(m) == ("gtx1080" if there else "cpu")


def test_cpu_and_control_group():
    cache = "/sys/devices/system/cpu/cpu{}/cache/index{}/{}"
    files = {
        "/proc/cpuinfo": "processor : 0\nmodel name\t: AMD  EPYC 7B13\n",
        "/proc/meminfo": "MemTotal:       16000000 kB\nMemFree: 1 kB\n",
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/memory.max": "4294967296\n",
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
    }
    for core in range(4):
        for index, (size, shared) in enumerate(
            [("32K", core), ("512K", core), ("32768K", core // 2)]
        ):
            files[cache.format(core, index, "size")] = f"{size}\n"
            files[cache.format(core, index, "shared_cpu_list")] = f"{shared}\n"
    m = hardware.detect(FakeProbe(files=files))
    assert (m.cpu_model, m.cores, m.cpu_quota) == ("AMD EPYC 7B13", 4, 1.5)
    assert (m.ram_bytes, m.cache_bytes) == (4 * GIB, 2 * 32 * 2**20)


def test_control_group_version_1():
    files = {
        "/proc/meminfo": "MemTotal: 16000000 kB\n",
        "/proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2147483648\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    m = hardware.detect(FakeProbe(files=files))
    assert (m.ram_bytes, m.cpu_quota) == (2 * GIB, 2.0)
    m = hardware.detect(FakeProbe())  # a machine that tells nothing
    assert (m.device, m.gpus, m.ram_bytes, m.cpu_quota, m.cache_bytes) == (
        "cpu",
        (),
        None,
        None,
        None,
    ) and m.name


# ---- a faked nvidia-smi on PATH: nothing is injected


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is here")
@pytest.mark.parametrize(
    "body, profile",
    [
        (
            "echo 'NVIDIA GeForce GTX 1080, 6.1, 8192 MiB, GPU-1, 580.65, 1911 MHz'",
            "gtx1080",
        ),
        *(
            (body, "cpu")
            for body in (
                "echo 'it has failed'; exit 9",
                "exec sleep 20",
                "echo hello, world",
                "echo a, b, c, d, e, f",
            )
        ),
    ],
)
def test_what_nvidia_smi_says(tmp_path, monkeypatch, body, profile):
    # hardware.detect is the function; its module is reached by name
    monkeypatch.setattr(sys.modules["ringlab.hardware.detect"], "SMI_TIMEOUT_S", 0.3)
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    m = hardware.detect(Probe())
    assert (m.device, hardware.match(m), len(m.gpus)) == (
        "cpu",
        profile,
        profile != "cpu",
    )
    assert (hardware.drivable(m) is None) == (profile == "cpu")


# ---- peaks


def test_bandwidth_by_working_set():
    p = hardware.Peaks(1e11, 4e10, 1.2e11, cache_bytes=32 * 2**20)
    assert p.bandwidth(2**20) == p.bandwidth(2**25) == pytest.approx(1.2e11)
    assert 4e10 < p.bandwidth(2**26) < 1.2e11 and p.bandwidth(2**40) == pytest.approx(
        4e10, rel=1e-3
    )
    assert hardware.Peaks(1e11, 4e10, 1.2e11).bandwidth(2**40) == pytest.approx(
        1.2e11
    ), "unknown size: never too low"
    best = p.best(hardware.Peaks(2e11, 3e10, 1e11))
    assert (best.flops_per_s, best.bytes_per_s_dram, best.bytes_per_s_cache) == (
        2e11,
        4e10,
        1.2e11,
    )


def test_rates_for_a_roofline():
    """One rule for estimates and measured rows: the best of the probes with a margin, a
    GPU's figures as they are.
    """
    peaks = [
        hardware.Peaks(1e11, 4e10, 1.2e11, cache_bytes=2**20),
        hardware.Peaks(2e11, 3e10, 3e10),
    ]
    rates = hardware.measured_rates(peaks, 2**40)
    assert (
        rates.flops_per_s == pytest.approx(1.1 * 2e11)
        and rates.link_bytes_per_s is None
    )
    assert rates.bytes_per_s == pytest.approx(1.1 * 4e10, rel=1e-3)
    card = hardware.get_profile("h100")
    assert card.rates(torch.float32, 2**40).flops_per_s == pytest.approx(
        card.flops["tf32"] / 3
    )
    assert card.rates(torch.bfloat16, 2**40) == hardware.Rates(
        989.4e12, 3350e9, max(card.links.values())
    )
    assert card.rates(torch.float64, 2**10) == hardware.Rates(
        None, None, max(card.links.values())
    ), "inside L2"

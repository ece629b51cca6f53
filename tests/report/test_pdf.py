"""PDF: a stand-in for Chromium shows what is asked of it and what its failures become;
a real one prints, if here.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from reporting import CPU
from ringlab import cli
from ringlab.report import pdf
from ringlab.report.places import ReportError, UsageError
from started import gone

PAGE = "<!DOCTYPE html><html lang='en'><title>A report</title><p>hello <img alt='' src='http://example.invalid/x.png'>"
STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" >>'{folder}/asked'
for a in "$@"; do case $a in --print-to-pdf=*) out=${{a#--print-to-pdf=}} ;; esac; done
echo '[1:2:0101/000000:ERROR:dbus/bus.cc(408)] Failed to connect to the bus' >&2
{does}
"""
PRINTS = "printf '%%PDF-1.4\\n%%%%EOF\\n' >\"$out\""
FAILS = "echo '[1:2:0101/000000:FATAL:zygote.cc(1)] No usable sandbox!' >&2; echo 'dbus again' >&2; exit 3"


def report(reports: Path, folder: str, *names: str) -> list[Path]:
    (reports / folder).mkdir(parents=True, exist_ok=True)
    paths = [reports / folder / f"{name}.html" for name in names]
    for path in paths:
        path.write_text(PAGE)
    return paths


@pytest.fixture
def browser(tmp_path, monkeypatch):
    """A function that puts a stand-in which does something in Chromium's place, and
    returns what it was asked.
    """
    place = tmp_path / "bin"
    place.mkdir()

    def put(does):
        (place / "chromium").write_text(STAND_IN.format(folder=place, does=does))
        (place / "chromium").chmod(0o755)
        return place / "asked"

    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return put


def test_each_report_is_printed_beside_its_page_with_the_network_off(tmp_path, browser):
    asked = browser(PRINTS)
    reports = tmp_path / "reports"
    report(reports, "cpu", "one", "two words")
    written = pdf.run("auto", reports=reports, machine=CPU)
    assert written == [reports / "cpu" / "one.pdf", reports / "cpu" / "two words.pdf"]
    assert all(path.read_bytes().startswith(b"%PDF-") for path in written)
    assert not list((reports / "cpu" / "tmp").iterdir()), "a scratch folder is left"
    arguments = asked.read_text().splitlines()
    assert {
        "--headless",
        "--no-pdf-header-footer",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    } <= set(arguments)
    assert arguments.count((reports / "cpu" / "two words.html").as_uri()) == 1
    assert ("--no-sandbox" in arguments) == (os.geteuid() == 0)


def test_which_reports_are_printed(tmp_path):
    reports = tmp_path / "reports"
    (rehearsed,) = report(reports, "gtx1080-rehearsal", "one")
    assert pdf.pages("auto", reports, CPU) == [rehearsed], (
        "all there are, where this machine has none"
    )
    with pytest.raises(UsageError, match="no report in .*cpu yet"):
        pdf.pages("cpu", reports, CPU)
    (own,) = report(reports, "cpu", "one")
    assert pdf.pages("auto", reports, CPU) == [own]
    assert pdf.pages("gtx1080", reports, CPU) == [rehearsed]
    (measured,) = report(reports, "gtx1080", "one")
    assert pdf.pages("gtx1080", reports, CPU) == [measured], (
        "its own before its rehearsal's"
    )
    assert pdf.pages("gtx1080-rehearsal", reports, CPU) == [rehearsed], (
        "or the one that is named"
    )


@pytest.fixture
def said(tmp_path, capsys, monkeypatch):
    """(exit code, stdout, stderr) of the command for a profile's reports."""
    monkeypatch.chdir(tmp_path)

    def run(profile: str = "cpu"):
        code = cli.main(["pdf", "--profile", profile, "--reports", str(tmp_path)])
        out, err = capsys.readouterr()
        assert err.count("\n") == (code != 0) and "Traceback" not in err
        return code, out, err

    return run


def test_the_command_prints_paths_or_says_what_writes_a_report(tmp_path, said, browser):
    browser(PRINTS)
    report(tmp_path, "cpu", "one")
    assert said() == (0, "cpu/one.pdf\n", "")
    for profile, why in (
        ("h100", "write it first: make report GPU=h100"),
        ("h1000", "did you mean 'h100'"),
    ):
        code, _, err = said(profile)
        assert code == 2 and why in err


def test_no_browser_says_what_to_install(tmp_path, said, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    report(tmp_path, "cpu", "one")
    code, _, err = said()
    assert code == 2 and "none is here; install one (" in err and "CHROMIUM=" in err
    monkeypatch.setenv("CHROMIUM", "/nowhere/chrome")
    code, _, err = said()
    assert code == 2 and "CHROMIUM=/nowhere/chrome is no program" in err


def test_a_browser_is_found_or_named_with_options_and_spaces(
    tmp_path, browser, monkeypatch
):
    browser(PRINTS)
    own = tmp_path / "bin" / "chromium"
    assert pdf.chromium() == [str(own)]
    monkeypatch.setenv("CHROMIUM", f"{own} --no-sandbox")
    assert pdf.chromium() == [str(own), "--no-sandbox"]
    spaced = own.rename(own.with_name("Google Chrome"))
    monkeypatch.setenv("CHROMIUM", str(spaced))
    assert pdf.chromium() == [str(spaced)]


@pytest.mark.parametrize(
    "does, why",
    [
        (FAILS, "exit code 3; No usable sandbox!"),
        ("exit 0", "it wrote no whole PDF"),
        ("printf '%%PDF-1.4 half' >\"$out\"", "it wrote no whole PDF"),
    ],
)
def test_a_failing_browser_is_one_line_and_keeps_the_earlier_pdf(
    tmp_path, said, browser, does, why
):
    browser(does)
    (page,) = report(tmp_path, "cpu", "one")
    page.with_suffix(".pdf").write_text("earlier")
    code, out, err = said()
    assert (
        code == 1
        and out == ""
        and re.search(f"chromium could not print .*one.html: {why}", err)
    )
    assert page.with_suffix(".pdf").read_text() == "earlier"


def test_a_browser_that_hangs_is_stopped_with_its_children(tmp_path, browser):
    browser(f"sleep 60 & echo $! >'{tmp_path}/child'; wait")
    (page,) = report(tmp_path, "cpu", "one")
    with pytest.raises(ReportError, match="did not end within 1 s"):
        pdf.print_page(page, pdf.chromium(), timeout_s=1)
    assert gone([int((tmp_path / "child").read_text())], 5.0)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, said, browser):
    browser(PRINTS)
    (page,) = report(tmp_path, "cpu", "one")
    (page.parent / "tmp").write_text("a file is in the way")
    code, out, err = said()
    assert (
        code == 1
        and out == ""
        and re.search("cannot read or write .*tmp: File exists", err)
    )


@pytest.mark.skipif(not any(map(shutil.which, pdf.NAMES)), reason="no Chromium here")
def test_a_real_browser_prints_a_page(tmp_path):
    (page,) = report(tmp_path, "cpu", "one")
    data = pdf.print_page(page, pdf.chromium(), timeout_s=60).read_bytes()
    assert (
        data.startswith(b"%PDF-")
        and re.search(rb"/Type\s*/Page\b", data)
        and b"A report" in data
    )

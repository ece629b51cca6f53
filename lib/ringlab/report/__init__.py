"""The names that a notebook of a report calls, from rows to a page.

    from ringlab import report

    report.read_parameters(globals())
    here = report.source("cpu")
    study = report.measured(here, suites.landscape(here.profile, **here.how))
    rows = study.frame()  # one row a point, a pandas DataFrame
    report.table("Times", {"System": rows.system, ">Time (ms)": rows.row.map(report.time)})

The modules are imported when they are asked for, so that `ringlab.report.places` needs
no packages.
"""

from importlib import import_module

NAMES = {  # by the module where they are documented
    "report.parameters": "read_parameters",
    "report.study": "source listed measured",
    "report.tables": "table Text Code Cell number span percent size interval counted",
    "report.cells": "time roofline rate peak error times significance calls on_ranks "
    "peak_bytes sent_bytes density zero_rows pair_cost",
    "report.figures": "drawing in_ms palette lines show token_axes",
    "report.rows": "pass_of begins",
    "report.findings": "Finding finding fits limits failures provenance",
    "report.predicted": "accuracy",
    "report.documents": "counterpart printed",
    "report.published": "next_steps",
    "measure.validity": "timed status reason roofline_s",
}
VOCABULARY = {name: module for module in NAMES for name in NAMES[module].split()}


def __getattr__(name: str):
    if name not in VOCABULARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ringlab.{VOCABULARY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(VOCABULARY)

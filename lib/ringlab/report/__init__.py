"""What a notebook of a report calls, from rows to a page.

    from ringlab import report

    here = report.source("cpu")
    study = report.measured(here, suites.landscape(here.profile, **here.how))
    rows = study.frame()  # one row a point, a pandas DataFrame
    report.table("Times", {"System": rows.system, ">Time (ms)": rows.row.map(report.time)})

The modules are imported when they are asked for, so that `ringlab.report.places` needs
no packages.
"""

from importlib import import_module

VOCABULARY = {  # name: the module where it is documented
    "source": "report.study",
    "listed": "report.study",
    "measured": "report.study",
    "table": "report.tables",
    "Text": "report.tables",
    "Code": "report.tables",
    "Cell": "report.tables",
    "number": "report.tables",
    "percent": "report.tables",
    "size": "report.tables",
    "interval": "report.tables",
    "counted": "report.tables",
    "time": "report.cells",
    "roofline": "report.cells",
    "rate": "report.cells",
    "peak": "report.cells",
    "error": "report.cells",
    "times": "report.cells",
    "beyond": "report.cells",
    "timed": "measure.validity",
    "calls": "report.cells",
    "on_ranks": "report.cells",
    "peak_bytes": "report.cells",
    "sent_bytes": "report.cells",
    "density": "report.cells",
    "pair_cost": "report.cells",
    "in_ms": "report.figures",
    "palette": "report.figures",
    "lines": "report.figures",
    "pass_of": "report.rows",
    "label": "report.rows",
    "dense_beside": "report.rows",
    "begins": "report.rows",
    "status": "measure.validity",
    "reason": "measure.validity",
    "roofline_s": "measure.validity",
    "Bar": "report.figures",
    "bars": "report.figures",
    "show": "report.figures",
    "Finding": "report.findings",
    "finding": "report.findings",
    "fits": "report.findings",
    "bounds": "report.findings",
    "limits": "report.findings",
    "failures": "report.findings",
    "provenance": "report.findings",
    "accuracy": "report.predicted",
}


def __getattr__(name: str):
    if name not in VOCABULARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ringlab.{VOCABULARY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(VOCABULARY)

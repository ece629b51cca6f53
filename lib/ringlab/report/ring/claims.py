"""The claims of documents 001, 003 and 004, judged; ``verdicts`` says what the words mean."""

from __future__ import annotations

from collections.abc import Iterator

from ..published import published
from ..study import Study
from ..verdicts import Verdict
from . import comparison_claims, hybrid_claims, scaling_claims

TESTS = scaling_claims.TESTS | comparison_claims.TESTS | hybrid_claims.TESTS


def judge(study: Study, document: str) -> Iterator[tuple[dict, Verdict]]:
    """(claim, verdict) in the document's order; raises KeyError for a claim whose test does not exist."""
    for claim in published(document)["claims"]:
        yield claim, TESTS[claim["test"]](study, claim, document)

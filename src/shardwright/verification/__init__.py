"""Proof that a layout computes the same as one device: both are run, and all their results are compared.

case = cut(case_of(config), [layout])
with Verifier() as verifier:
    report = verifier.parity(case, layout)
print(report.equal, report.worst)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.verification.case import Case, case_of
    from shardwright.verification.compare import Report, ReportRow
    from shardwright.verification.cut_case import cut
    from shardwright.verification.verifier import Verifier, parity

__all__ = ["Case", "Report", "ReportRow", "Verifier", "case_of", "cut", "parity"]
_FROM = {
    "Case": "case",
    "Report": "compare",
    "ReportRow": "compare",
    "Verifier": "verifier",
    "case_of": "case",
    "cut": "cut_case",
    "parity": "verifier",
}
"""The module of each name; imported when the name is used, so that `ranks.start_server` can come before PyTorch."""


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'shardwright.verification' has no attribute {name!r}")
    return getattr(import_module(f"shardwright.verification.{_FROM[name]}"), name)

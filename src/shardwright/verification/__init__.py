"""Proof that a layout computes what one device computes: both are run, and everything they compute is compared.

case = cut(case_of(config), [layout])
with Verifier() as verifier:
    report = verifier.parity(case, layout)
print(report.equal, report.worst)
"""

from shardwright.verification.case import Case, case_of, cut
from shardwright.verification.compare import Report, Row
from shardwright.verification.verifier import Verifier, parity

__all__ = ["Case", "Report", "Row", "Verifier", "case_of", "cut", "parity"]

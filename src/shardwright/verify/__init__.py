"""Proof that a layout computes what one device computes: both are run, and everything they compute is compared.

case = cut(case_of(config), [layout])
with Verifier() as verifier:
    report = verifier.parity(case, layout)
print(report.equal, report.worst)
"""

from shardwright.verify.case import Case, case_of, cut
from shardwright.verify.compare import Report, Row
from shardwright.verify.verifier import Verifier, parity

__all__ = ["Case", "Report", "Row", "Verifier", "case_of", "cut", "parity"]

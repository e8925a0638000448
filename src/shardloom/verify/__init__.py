"""Proof that a layout computes what one device computes: both are run, and everything they compute is compared.

case = cut(config, [layout])
with Verifier() as verifier:
    report = verifier.parity(case, layout)
print(report.equal, report.worst)
"""

from shardloom.verify.case import Case, cut
from shardloom.verify.compare import Report, Row
from shardloom.verify.verifier import Verifier, parity

__all__ = ["Case", "Report", "Row", "Verifier", "cut", "parity"]

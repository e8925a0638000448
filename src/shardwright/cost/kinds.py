"""Names of the parts of a step's time that several modules use."""

MATMULS, ELEMENTWISE, TENSOR, CONTEXT, EXPERT, DATA, HOST = (
    "matmuls",
    "element-wise",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "data parallel",
    "copies to and from the host",
)
"""Kinds of work."""

"""What other libraries, checkpoints and kernels compute, against the definition."""

from __future__ import annotations

from posenc.audit.candidate import Candidate, CannotExpressError, Sizes
from posenc.audit.gold import drawn_params
from posenc.audit.record import Record, exit_status

__all__ = ["Candidate", "CannotExpressError", "Record", "Sizes", "drawn_params", "exit_status"]

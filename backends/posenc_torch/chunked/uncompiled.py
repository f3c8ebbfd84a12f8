"""``run`` as PyTorch's compiler leaves it alone. Imported late: it imports that compiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posenc.backend import Call, LogSumExp
from posenc_torch.chunked import run as plain
from posenc_torch.chunked.parts import WHY_NOT_COMPILED

run: Callable[[Call], tuple[Tensor, LogSumExp | None]] = torch.compiler.disable(
    plain.run, reason=WHY_NOT_COMPILED
)  # type: ignore[no-untyped-call]

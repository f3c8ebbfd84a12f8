"""For what FlexAttention's compiler makes a kernel: C++ for a CPU, Triton for a GPU, or nothing."""

from __future__ import annotations

import sys

from torch import Tensor

from posenc_torch.tracing import constant_in_programs

KINDS = ("cpu",)  # of devices whose kernels are C++
# Backends of torch.compile that generate no kernels.
_EAGER = ("eager", "aot_eager", "pre_dispatch_eager", "cudagraphs")


def is_cpu(array: Tensor) -> bool:
    """Whether the kernel that takes an array is the one for a CPU, which has limits of its own."""
    return array.device.type in KINDS


@constant_in_programs
def eager_backend() -> str | None:
    """The backend of the ``torch.compile`` that traces this call, if it generates no kernels.

    None if there is no such program, or if the backend is a function.
    """
    # Torch has no public way to ask. Where this one is gone, the answer is None.
    translator = getattr(
        getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "tls", None), "current_tx", None
    )
    compiler = getattr(getattr(translator, "output", None), "compiler_fn", None)
    name = getattr(compiler, "compiler_name", None)
    return name if isinstance(name, str) and name.startswith(_EAGER) else None

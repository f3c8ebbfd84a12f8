"""The language of the kernels for Hopper GPUs, where this JAX has it.

On an older JAX every module can be imported all the same; ``mosaic_gpu.why_not_here`` refuses.
"""

from __future__ import annotations

from typing import Any

import jax

OLDEST = (0, 11)  # JAX; before it, kernels were written in other words

plgpu: Any = None
WGMMA: Any = None  # how a tile lies in the registers of a warpgroup,
OF_ROWS: Any = None  # one number a row of it,
OF_COLUMNS: Any = None  # and one a column

if jax.__version_info__[:2] >= OLDEST:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    WGMMA = plgpu.Layout.WGMMA
    OF_ROWS, OF_COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)

"""Mosaic GPU and its register layouts, where this JAX has them.

Every module of these kernels imports on an older JAX too; ``Hopper.unsupported`` then says why
they do not run.
"""

from __future__ import annotations

from typing import Any

import jax

OLDEST = (0, 11)  # JAX; before it, Mosaic GPU had another interface

plgpu: Any = None
WGMMA: Any = None  # the layout of a tile in the registers of a warpgroup
ROW_LAYOUT: Any = None  # of one number per row of such a tile
COLUMN_LAYOUT: Any = None  # of one number per column

if jax.__version_info__[:2] >= OLDEST:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    WGMMA = plgpu.Layout.WGMMA
    ROW_LAYOUT, COLUMN_LAYOUT = WGMMA.reduce(1), WGMMA.reduce(0)


def cuda_runtime() -> tuple[int, int] | None:
    """Version of the CUDA that JAX uses, as (12, 9); None if JAX does not say.

    There is no third number: CUDA reports 12.9.0 and 12.9.1 alike.
    """
    try:
        # JAX has no public name for it.
        from jax._src.lib import cuda_versions

        version = int(cuda_versions.cuda_runtime_get_version())  # type: ignore[union-attr]
    except (ImportError, AttributeError, RuntimeError):  # no CUDA, another JAX, no library
        return None
    return version // 1000, version % 1000 // 10

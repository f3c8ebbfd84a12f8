"""Parts of ``gpu_check.py`` and ``cpu_ratio.py``.

``clock``, ``record``, ``cases``, ``correctness``, ``exact``, ``speed`` and ``ratios`` import no
framework; ``torch_*`` and ``jax_*`` are for PyTorch and JAX.
"""

"""What ``gpu_check.py`` and ``cpu_ratio.py`` are made of.

``clock``, ``record``, ``cases``, ``right``, ``speed`` and ``ratios`` know no framework; ``torch_*``
and ``jax_*`` are PyTorch's and JAX's.
"""

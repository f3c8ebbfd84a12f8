"""What ``gpu_check.py`` and ``cpu_ratio.py`` are made of.

``clock``, ``record``, ``cases``, ``right`` and ``ratios`` know no framework; ``torch_checks``,
``torch_clock``, ``torch_variants`` and ``torch_speed`` are PyTorch's.
"""

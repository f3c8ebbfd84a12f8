"""What the commands in ``benchmarks/`` share.

``run`` says how a framework runs a function: ``numpy_run``, ``torch_run`` and ``jax_run`` do, for
every command and for asv's suite. ``clock`` has the budget of time, turns and the record of a
speed. ``device``, ``variants``, ``speed``, ``exact`` and ``correctness`` are the parts of
``gpu_check.py`` and ``cpu_ratio.py``, with ``torch_*`` and ``jax_*`` for what a framework has of
its own.
"""

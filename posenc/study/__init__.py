"""The study behind ``posenc compare``: train short, test long, everything equal but the scheme.

``Study`` (in ``study``) is the configuration, ``run_study`` (in ``runner``) carries it out, and
``report``, ``tables`` and ``plots`` show its records.
"""

"""The command line: ``posenc compare``, ``list`` and ``show``."""

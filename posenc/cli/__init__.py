"""The command line: ``posenc compare``, ``show`` and ``list``, one module per command."""

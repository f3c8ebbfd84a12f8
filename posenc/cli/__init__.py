"""The command line: ``posenc compare``, ``show``, ``rope`` and ``list``, one module per command."""

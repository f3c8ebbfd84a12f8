"""The command line: ``posenc compare``, ``audit``, ``show`` and others, one module a command."""

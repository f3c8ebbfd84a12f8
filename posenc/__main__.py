"""``python -m posenc``: the command."""

from posenc.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

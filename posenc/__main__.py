"""``python -m posenc``: the command."""

from posenc.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

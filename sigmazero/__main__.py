"""``python -m sigmazero`` and the ``sigmazero`` command."""

from sigmazero.cli import main

if __name__ == "__main__":
    main()

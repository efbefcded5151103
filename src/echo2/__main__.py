"""``python -m echo2`` is the ``echo2`` command; the supervisor starts its programs this way."""

from echo2.cli import main

if __name__ == "__main__":
    main()

"""`python -m draftfleet` is `draftfleet`."""

from draftfleet.cli import main

if __name__ == "__main__":
    main()

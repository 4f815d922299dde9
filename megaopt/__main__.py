"""`python -m megaopt`: the command line."""

import sys

from megaopt.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

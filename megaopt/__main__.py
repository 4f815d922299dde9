"""`python -m megaopt`: the command line."""

import sys

if __name__ == "__main__":
    from megaopt.lab.cli import main

    sys.exit(main())

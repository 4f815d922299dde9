"""`python -m megaopt`: the command line."""

import os
import sys

import megaopt

if __name__ == "__main__":
    # -m puts the working directory in front: a file there, named as a module that is imported later
    # or not at all, is no part of megaopt
    home = os.path.dirname(os.path.dirname(os.path.realpath(megaopt.__file__)))
    first = os.path.realpath(sys.path[0])
    is_put = not getattr(sys.flags, "safe_path", False) and first == os.path.realpath(os.getcwd())
    if is_put and first != home:
        del sys.path[0]

    from megaopt.commands.cli import main

    sys.exit(main())

"""The step against a same-run copy: `megaopt bench`.

`main` is the command; cases says what is measured, equality what must hold before it is.
"""

from megaopt.bench.command import main

__all__ = ["main"]

"""What the CPU's processes have imported, and made, before they are made."""

import megaopt.commands.regression.rank  # noqa: F401
from megaopt.commands.training.text import load_corpus

load_corpus()

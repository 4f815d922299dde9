"""Imports what the CPU's processes need, and loads their text, before they are made."""

import megaopt.commands.regression.rank  # noqa: F401
from megaopt.commands.training.text import load_corpus

load_corpus()

"""Imports what the CPU's processes need, and loads their text, before they are made."""

import megaopt.lab.regression.processes  # noqa: F401
from megaopt.lab.training.text import load_corpus

load_corpus()

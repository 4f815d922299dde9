"""Whole matrices, stepped by any value of rules.matrix.MatrixRule, alone or shared among ranks.

plan.py steps matrices one by one, in plain torch or with launches of what is elementwise, which are
in launch.py. shared.py steps those of which ranks have parts: exchange.py says what ranks do for
one another, and bucket.py how a bucket steps. megaopt.kernels.galore and megaopt.kernels.muon have
a rule each, and launches over many matrices.
"""

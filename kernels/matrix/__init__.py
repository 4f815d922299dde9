"""Rules that work on whole matrices: GaLore's, Muon's, any other value of rules.matrix.MatrixRule.

plan.py steps such matrices one by one, in plain torch or with the step's kernel for what is
elementwise. galore.py is GaLore's rule, and launch.py steps it in launches over many matrices; so
are muon.py and muon_launch.py. muon_peers.py has other libraries' Muon.
"""

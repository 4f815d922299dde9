"""Muon: the momentum's direction, made orthogonal by Newton and Schulz's iteration.

orthogonal.py has the settings, newton_schulz.py the iteration and its twin in torch, rule.py the
rule, plan.py what steps a batch. launch.py has launches over many matrices, wave.py those of some
that lie together as layout.py says, ranks.py those of matrices that ranks share; normuon.py has
second moments, peers.py other libraries' Muon.
"""

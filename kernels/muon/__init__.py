"""Muon: the momentum's direction, made orthogonal by Newton and Schulz's iteration.

orthogonal.py has the settings, newton_schulz.py the iteration and its twin in torch, rule.py the
rule. launch.py is the plan of launches over many matrices, wave.py some of them launched together;
ranks.py has those that ranks share, normuon.py second moments, peers.py other libraries' Muon.
"""

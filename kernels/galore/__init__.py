"""GaLore: gradients projected to a low rank, Adam's step there, updates projected back.

rule.py is the rule and its twin in torch, launch.py the plan of launches over many matrices,
wave.py some matrices launched together by kernel.py, in tiles of tiles.py; ranks.py has those that
ranks share, products.py the products' precisions;
compiled.py has elementwise steps by torch.compile.
"""

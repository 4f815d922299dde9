"""GaLore's step of a matrix: project the gradient, take Adam's step there, project back, update.

Two of the step's own rules (megaopt.kernels.rules.galore) do what is elementwise, so that formats,
groups, random bits, unscaling and skipping are the step's: GALORE_DIRECTION steps the projected
gradient, and leaves Adam's direction in its place; GALORE_APPLY takes what was projected back from
weight and master. In between are matrix products.

reference.py is the twin. launch.py makes the same of launches over many matrices: project.py's
projection, or torch's; the step's; and kernel.py's, which projects back and updates.
"""

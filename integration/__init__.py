"""Plugs for outside systems: one module per system, each importing its system only when it is used."""

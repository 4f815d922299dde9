"""Plugs for outside systems: a module per system, each importing its system only when used."""

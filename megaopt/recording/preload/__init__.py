"""A folder for PYTHONPATH: what Python starts with in a recorded process."""

VARIABLE = "MEGAOPT_RECORD"
"""The environment variable with a recorder's options, as JSON; `megaopt record` sets it."""

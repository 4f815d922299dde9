"""A folder for PYTHONPATH: what Python starts with in a recorded process."""

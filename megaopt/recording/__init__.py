"""Recordings of training runs: written in any loop, compared, audited.

A module is imported on demand: `megaopt.recording.files` needs numpy alone.
"""

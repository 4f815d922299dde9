"""Modules with one piece of their text replaced, to see a check notice."""

import importlib.util
import sys

import pytest


def each_of(mutants):
    """A test's parameters: what each table of changes is of, a text or several, and a change."""
    several = {key if isinstance(key, tuple) else (key,): own for key, own in mutants.items()}
    return [
        pytest.param(*key, change, id=f"{key[0]}: {name}")
        for key, own in several.items()
        for name, change in own.items()
    ]


def mutant(path, change, folder):
    old, new = change
    source = path.read_text()
    assert source.count(old) == 1, f"{path.name} has {source.count(old)} times: {old}"
    target = folder / f"mutant_{path.name}"
    target.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(target.stem, target)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module

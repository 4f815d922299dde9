"""What Python imports at its start where this folder is on PYTHONPATH: it waits for torch."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))


class Waiting(importlib.abc.MetaPathFinder):
    """Finds torch as the others do, and starts the recorder when it has been imported."""

    def find_spec(self, name: str, *_: Any) -> Any:
        """The module's spec, whose loader also starts the recorder; None for others than torch."""
        if name == "megaopt":
            importlib.import_module("torch")  # or the recorder would import what imports torch
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader.exec_module = starting(spec.loader.exec_module)
        return spec


def starting(execute: Any) -> Any:
    """What executes a module, and starts the recorder behind it."""

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            from megaopt.recording.runner import start
        except ModuleNotFoundError as error:
            wanted = f"megaopt must be installed for {sys.executable} to be recorded: {error}"
            raise SystemExit(f"megaopt: {wanted}") from None
        start()

    return exec_module


def chain() -> None:
    """Runs the sitecustomize that this one stands before."""
    others = [each for each in sys.path if os.path.abspath(each) != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, Waiting())
chain()

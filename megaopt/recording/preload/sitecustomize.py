"""Python imports this at its start where this folder is on PYTHONPATH: it waits for torch."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))


class Waiting(importlib.abc.MetaPathFinder):
    """Finds torch as other finders do, and starts the recorder when torch has been imported."""

    def find_spec(self, name: str, *_: Any) -> Any:
        """Returns the spec, whose loader also starts the recorder; None unless it is torch's."""
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
    """Returns a function that executes a module, and then starts the recorder."""

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            from megaopt.recording.runner import start
        except ModuleNotFoundError as error:
            message = f"megaopt must be installed for {sys.executable} to be recorded: {error}"
            raise SystemExit(f"megaopt: {message}") from None
        start()

    return exec_module


def chain() -> None:
    """Runs the sitecustomize that this one stands before."""
    paths = [path for path in sys.path if os.path.abspath(path) != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, Waiting())
chain()

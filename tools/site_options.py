"""An extension of griffe, which reads the source for the API page: optimizers' **options by name.

`show_options` (megaopt/options/arguments.py) puts them into signatures and docstrings when the
package is imported; the page shows what `help()` shows.
"""

import importlib
import inspect
from typing import Any

import griffe


class Options(griffe.Extension):
    """Puts what `show_options` wrote in the place of **options."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called for each class that was read."""
        if f"\nshow_options({cls.name}, " not in cls.module.filepath.read_text("utf-8"):
            return
        optimizer = getattr(importlib.import_module(cls.module.path), cls.name)
        init = cls.members["__init__"]
        assert isinstance(init, griffe.Function)
        assert cls.docstring is not None
        read = [each for each in init.parameters if each.name != "options"]
        options = [
            griffe.Parameter(
                name,
                annotation=str(each.annotation),
                kind=griffe.ParameterKind.keyword_only,
                default=str(each.default) if "." in str(each.default) else repr(each.default),
            )
            for name, each in inspect.signature(optimizer.__init__).parameters.items()
            if name not in init.parameters
        ]
        init.parameters = griffe.Parameters(*read, *options)
        cls.docstring.value = inspect.cleandoc(optimizer.__doc__)

"""The fused, sharded optimizer for Megatron-class training."""


def _drop_working_directory() -> None:
    """Takes the working directory from sys.path where `python -m megaopt` has put it.

    A file there, named as a module that is imported later, is no part of megaopt. It stays where
    this package itself was found in it.
    """
    import os
    import sys  # both are imported already, wherever Python starts

    if sys.argv[:1] != ["-m"]:  # which stands there while Python looks for what -m names
        return
    before_arguments = "".join(sys.orig_argv[-len(sys.argv) :][:1])
    is_joined = before_arguments[:1] == "-" and before_arguments.endswith("mmegaopt")
    if before_arguments != "megaopt" and not is_joined:
        return

    first, here = os.path.realpath(sys.path[0]), os.path.realpath(os.getcwd())
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if not getattr(sys.flags, "safe_path", False) and first == here != home:
        del sys.path[0]


_drop_working_directory()  # before any other import, which might find a file there

from importlib import import_module  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from megaopt.adam import FusedAdam
    from megaopt.float8 import to_float8
    from megaopt.galore import GaLoreAdamW
    from megaopt.lion import FusedLion
    from megaopt.models.cast import cast_model
    from megaopt.models.fp32 import get_fp32_model_state_dict, set_fp32_model_state_dict
    from megaopt.models.muon_groups import muon_groups
    from megaopt.models.muon_presets import MUON_PRESETS
    from megaopt.models.release import release_gradients
    from megaopt.muon import FusedMuon
    from megaopt.options.options import SharedOptions, StepOptions
    from megaopt.recording.digest import digest, digest_many, hexadecimal
    from megaopt.recording.recorder import Recorder
    from megaopt.saving import checkpoint as checkpoint
    from megaopt.sgd import FusedSGD

__version__ = "0.1.0"

__all__ = [
    "MUON_PRESETS",
    "FusedAdam",
    "FusedLion",
    "FusedMuon",
    "FusedSGD",
    "GaLoreAdamW",
    "Recorder",
    "SharedOptions",
    "StepOptions",
    "__version__",
    "cast_model",
    "digest",
    "digest_many",
    "get_fp32_model_state_dict",
    "hexadecimal",
    "muon_groups",
    "release_gradients",
    "set_fp32_model_state_dict",
    "to_float8",
]

HOMES = {
    "MUON_PRESETS": "megaopt.models.muon_presets",
    "FusedAdam": "megaopt.adam",
    "FusedLion": "megaopt.lion",
    "FusedMuon": "megaopt.muon",
    "FusedSGD": "megaopt.sgd",
    "GaLoreAdamW": "megaopt.galore",
    "Recorder": "megaopt.recording.recorder",
    "SharedOptions": "megaopt.options.options",
    "StepOptions": "megaopt.options.options",
    "cast_model": "megaopt.models.cast",
    "digest": "megaopt.recording.digest",
    "digest_many": "megaopt.recording.digest",
    "get_fp32_model_state_dict": "megaopt.models.fp32",
    "hexadecimal": "megaopt.recording.digest",
    "muon_groups": "megaopt.models.muon_groups",
    "release_gradients": "megaopt.models.release",
    "set_fp32_model_state_dict": "megaopt.models.fp32",
    "to_float8": "megaopt.float8",
}
MODULES = {"checkpoint": "megaopt.saving.checkpoint"}
"""Modules that docs/api.md has whole."""


def __dir__() -> list[str]:
    module_names = {name for name, value in globals().items() if isinstance(value, ModuleType)}
    return sorted({*module_names, *__all__, *MODULES})


def __getattr__(name: str) -> Any:
    # on demand: Triton decides when the kernels are imported whether they are interpreted, and the
    # command line, which is imported after this, sets that
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    if name in MODULES:
        return import_module(MODULES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The child process that builds native.cpp: `python native_build.py SOURCE TARGET`.

It finds the target locked for it (megaopt.kernels.native), and imports nothing of megaopt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

AN_HOUR = 3600.0


def main(source: Path, target: Path) -> int:
    """Puts the extension in place in one move, or says why not and leaves nothing behind."""
    # so that a signal to end lets it clean up
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the compiler's process was ended"))
    os.nice(19)
    folder = Path(tempfile.mkdtemp(prefix=f"{target.stem}.", dir=target.parent))
    try:
        if not target.exists():  # another process may have built it just before
            _remove_leftovers(target)
            _build(source, target.stem, folder)
            os.replace(folder / target.name, target)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        target.with_suffix(".lock").unlink(missing_ok=True)
    return 0


def _build(source: Path, name: str, folder: Path) -> None:
    from torch.utils import cpp_extension  # takes a second, within `main`'s care

    cpp_extension.load(
        name=name,
        sources=[str(source)],
        # without asserts, as torch is built: its headers, and Python's, check much at each call
        # otherwise; with -O2 loops over columns take half again as long, or are left as they are
        extra_cflags=["-O3", "-DNDEBUG"],
        build_directory=str(folder),
        with_cuda=False,
    )


def _remove_leftovers(target: Path) -> None:
    """Removes what processes that were killed have left."""
    for old in target.parent.glob(f"{target.stem}.*"):
        with contextlib.suppress(OSError):  # another removed it
            if old.is_dir() and time.time() - old.stat().st_mtime > AN_HOUR:
                shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

"""A plugin of pytest: runs that are recorded in tests, and held to each other or to golden values.

pytest finds it where megaopt is installed, and it imports nothing before a test asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from megaopt.recording.files import Recording
    from megaopt.recording.recorder import Recorder

UPDATE = "--golden-update"
CLEAN = pytest.StashKey[bool]()
"""Whether git was asked, once, before files were updated."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    text = "renew the files of tests marked golden, from what they record now"
    parser.getgroup("megaopt").addoption(UPDATE, action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    text = "golden(file): what recorded_run records is to be what the file has, bit for bit"
    config.addinivalue_line("markers", text)


def assert_same_run(
    a: str | os.PathLike[str] | Recorder,
    b: str | os.PathLike[str] | Recorder,
    names: Mapping[str, str] | None = None,
) -> None:
    """Raises AssertionError, with the report of `compare`, unless two runs are the same.

    Args:
        a: the run that counts as right: its folder, or its recorder, which is closed.
        b: the other.
        names: what a tensor of b is called in a, by its name in b.
    """
    from megaopt.recording.compare import compare
    from megaopt.recording.printable import short

    __tracebackhide__ = True
    comparison = compare(_recording(a), _recording(b), names)
    if comparison.verdict != "same":
        raise AssertionError("\n".join(map(short, comparison.report())))


def _recording(run: str | os.PathLike[str] | Recorder) -> Recording:
    from megaopt.recording.files import Recording

    if isinstance(run, (str, os.PathLike)):
        return Recording(Path(run))
    run.close()
    return Recording(run.folder)


class RecordedRun:
    """Makes recorders: called as `Recorder` is, without a folder.

    Args:
        folder: in which each recorder gets one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.recorders: list[Recorder] = []

    def __call__(self, model: Any, optimizer: Any, **options: Any) -> Recorder:
        """A new recorder, with `Recorder`'s own arguments."""
        from megaopt.recording.recorder import Recorder

        folder = self._folder / f"run-{len(self.recorders)}"
        self.recorders.append(Recorder(model, optimizer, folder, **options))
        return self.recorders[-1]


@pytest.fixture
def recorded_run(tmp_path: Path) -> Generator[Callable[..., Recorder]]:
    """Makes recorders, `recorded_run(model, optimizer)`; those left open are closed at the end."""
    factory = RecordedRun(tmp_path)
    yield factory
    for recorder in factory.recorders:
        recorder.close()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Holds what a test marked golden has recorded to its file, when the test is through."""
    result = yield
    marker, config = pyfuncitem.get_closest_marker("golden"), pyfuncitem.config
    if marker is None:
        return result
    from megaopt.recording import golden
    from megaopt.recording.checks import RecordingError
    from megaopt.recording.printable import short

    factory = pyfuncitem.funcargs.get("recorded_run")
    if not isinstance(factory, RecordedRun) or not factory.recorders:
        pytest.fail("a test marked golden must record a run by recorded_run, got none")
    file = pyfuncitem.path.parent / marker.args[0]
    try:
        runs = [_recording(recorder) for recorder in factory.recorders]
        # a file that is to be renewed gets the first run's values
        if config.getoption(UPDATE) and not file.exists():
            golden.make(file, runs[0])
        elif config.getoption(UPDATE) and golden.check(file, runs[0]).comparison.verdict != "same":
            if not config.stash.get(CLEAN, False):
                golden.refuse_changes(file)
                config.stash[CLEAN] = True
            golden.update(file, runs[0], f"pytest {UPDATE}")
        if not file.exists():
            pytest.fail(f"{file} must be there: pytest {UPDATE} writes it")
        for run in runs:
            check = golden.check(file, run)
            if check.comparison.verdict != "same":
                lines = check.line, *check.comparison.report()[1:]
                pytest.fail("\n".join(map(short, lines)), pytrace=False)
    except RecordingError as error:
        pytest.fail(str(error), pytrace=False)
    return result

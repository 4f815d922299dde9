"""What commands print where there is no terminal."""

import io

import pytest
from rich.console import Console

from megaopt.lab import console as consoles


@pytest.mark.parametrize("every", [0.0, 1000.0])
def test_a_log_has_a_line_of_progress_now_and_then(monkeypatch, every):
    monkeypatch.setattr(consoles, "EVERY", every)
    log = io.StringIO()
    with consoles.step_progress(Console(file=log, width=80)) as progress:
        task = progress.add_task("training", total=3)
        progress.update(task, completed=2)
        for _ in progress.track(range(2), description="stepping [cases]"):
            pass
    told = [line.partition("s  ")[2] for line in log.getvalue().splitlines()]
    expected = ["training: 2 of 3", "stepping [cases]: 1 of 2", "stepping [cases]: 2 of 2"]
    assert told == (expected if every == 0 else [])

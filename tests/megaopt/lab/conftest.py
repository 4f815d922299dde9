import pytest

from megaopt.lab import cli


@pytest.fixture
def megaopt(capsys, tmp_path, monkeypatch):
    """Runs the command line in this process: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run

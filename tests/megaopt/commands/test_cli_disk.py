"""A command whose disk is full says so in a line; what was there before stays."""

import pytest
from checkpoints import full_disk
from tiny_runs import UNFUSED, fused, tiny_run

from megaopt.commands import cli

RUN = tiny_run(2, optimizer="weight_decay = 0.1") + UNFUSED + fused()

COMMANDS = {
    "record": (["regress", "small.toml"], "out/small/record.json"),
    "checkpoint": (["train", "small.toml", "--save", "saved"], "saved"),
    "result": (["train", "small.toml", "--result", "result"], "result"),
}


@pytest.mark.parametrize(("arguments", "file"), COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_told_in_a_line(tmp_path, monkeypatch, capsys, arguments, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(RUN, encoding="utf-8")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"older")
    with full_disk(500):
        status = cli.main(arguments)
    said = capsys.readouterr().err
    assert status == 2, said
    # (the test's folder is named whole or as it was asked for)
    assert said.startswith("megaopt: ")
    assert said.endswith(f"{file}: File too large\n")
    assert said.count("\n") == 1
    assert (tmp_path / file).read_bytes() == b"older"
    assert not [*tmp_path.rglob(".megaopt-*")]

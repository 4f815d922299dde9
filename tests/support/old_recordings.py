"""Recordings as older versions wrote them."""

import json


def undated(folder):
    """Takes away what tells from which step on an optimizer's groups are so, and what is new."""
    for rank in folder.glob("rank-*"):
        rewrite(rank / "manifest.jsonl", ("step", "anew"))
        rewrite(rank / "scalars.jsonl", ("has_all_old",))


def rewrite(path, left_out):
    lines = map(json.loads, path.read_text().splitlines())
    kept = ({key: own for key, own in line.items() if key not in left_out} for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))

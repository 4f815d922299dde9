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


def renamed(folder, names):
    """Gives tensors other names, as versions did that took two for one."""
    for rank in folder.glob("rank-*"):
        path = rank / "manifest.jsonl"
        lines = list(map(json.loads, path.read_text().splitlines()))
        for line in lines:
            if "name" in line:
                line["name"] = names.get(line["name"], line["name"])
            if "groups" in line:
                line["groups"] = [[names.get(n, n) for n in group] for group in line["groups"]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

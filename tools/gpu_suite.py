"""Runs the tests marked gpu in several processes, and writes what came of them as a record.

python tools/gpu_suite.py RECORD [options of pytest]
"""

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from megaopt.lab.source import describe, describe_source

COMMAND = ("pytest", "-m", "gpu and not slow", "-p", "no:benchmark", "-q", "-rsf")
COMMAND += ("-n", "16", "--dist", "load", "--maxschedchunk", "2", "--durations", "40")
LIBRARIES = ("transformer_engine", "apex", "flashoptim", "torchao", "bitsandbytes", "megatron-core")


def main(out: Path, options: list[str]) -> int:
    """Runs the tests and writes the record; returns pytest's own status."""
    report, start = out.with_suffix(".xml"), time.perf_counter()
    command = [*COMMAND, *options, "tests"]
    record = {"source": describe_source(), "environment": describe(), "command": " ".join(command)}
    status = subprocess.run([*command, "--junitxml", str(report)], check=False).returncode
    record |= {"libraries": {name: version(name) for name in LIBRARIES}, **outcomes(report)}
    record["seconds"] = round(time.perf_counter() - start, 1)
    out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return status


def version(library: str) -> str | None:
    """The version of an installed library; None without it."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def outcomes(report: Path) -> dict[str, Any]:
    """Counts the cases of pytest's JUnit report: all, by file, and why some were skipped."""
    whole: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        ended = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if ended is None else ended.tag
        module = case.get("classname", "").replace(".", "/") + ".py"
        whole[outcome] += 1
        files[module][outcome] += 1
        if ended is not None and outcome == "skipped":
            skipped[ended.get("message", "")] += 1
    return {"outcomes": whole, "skipped": skipped, "files": dict(sorted(files.items()))}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

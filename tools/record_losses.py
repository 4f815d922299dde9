"""Records the final losses of `megaopt regress` for megaopt/lab/regression/losses.json.

    python tools/record_losses.py AVX512=out/avx512/gpt_tiny AVX2=out/avx2/gpt_tiny

Each argument names a kind of processor and the folder of a run's record.json; docs/internals.md
says by which variables one processor passes for another. All runs are of one config of this
checkout.
"""

import json
import sys
from pathlib import Path

from megaopt.lab.configs import find_config
from megaopt.lab.regression.record import FILE, digest_of, recorded


def main(arguments: list[str]) -> None:
    """Write the losses of the runs into the file, in the place of the config's earlier ones."""
    losses = {}
    for argument in arguments:
        processor, _, folder = argument.partition("=")
        record = json.loads((Path(folder) / "record.json").read_text(encoding="utf-8"))
        variants = record["variants"]
        losses[processor] = {name: own["losses"][-1] for name, own in variants.items()}
        name, torch = Path(folder).name, record["versions"]["torch"].partition("+")[0]
    found = recorded() if FILE.exists() else {}
    found[name] = {"config": digest_of(find_config(Path(name))), "torch": torch, "losses": losses}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""galore_torch 1.0's GaLoreAdamW8bit under its name, over megaopt.GaLoreAdamW.

Changing the import keeps a script; the bits are this package's. galore_torch's GaLoreAdamW is
megaopt.GaLoreAdamW itself (docs/how-to/galore.md). galore_torch and bitsandbytes are needed to read
their files alone.
"""

from __future__ import annotations

from typing import Any

import megaopt
from megaopt.integration import bitsandbytes
from megaopt.integration.drop_in import ADAMW, IN_BLOCKS, Meanings
from megaopt.kernels.refusals import refuse
from megaopt.params.view import FEWEST_IN_ROWS

__all__ = ["GaLoreAdamW8bit"]

TAKES: dict[str, Any] = {**ADAMW, "optim_bits": 32, "args": None, "min_8bit_size": FEWEST_IN_ROWS}
TAKES |= {"percentile_clipping": 100, "block_wise": True, "is_paged": False, "*": None, "seed": 0}
MEANS: Meanings = {"optim_bits": {32: {}}, "is_paged": {False: {}}}
FIXED: dict[str, Any] = {**IN_BLOCKS, "refresh": "svd", "stagger": False}


class GaLoreAdamW8bit(bitsandbytes._Base, megaopt.GaLoreAdamW, takes=TAKES, means=MEANS, **FIXED):
    """galore_torch's GaLoreAdamW8bit: megaopt.GaLoreAdamW with moments of 8 bits in blocks.

    Groups say rank, update_proj_gap, scale and proj_type. Moments are "block_e4m3" and
    "block_e5m3", as in megaopt.integration.bitsandbytes, where the projected gradient has at least
    4,096 elements and its rows are whole blocks of 128; else they are fp32, of 4 times the bytes.
    Projected on the right it is of shape (rows, rank), so that rank has to be a multiple of 128; on
    the left of shape (rank, columns). proj_type="std" is the right for tall and square matrices.
    Projections are galore_torch's, by an SVD, all in one step.

    Arguments are galore_torch's, with its order and defaults.

    Args:
        params, lr, betas, eps, weight_decay: as megaopt.GaLoreAdamW takes them.
        amsgrad: only False; galore_torch ignores it in silence.
        optim_bits, args: only 32, and None; not used.
        min_8bit_size: at most 4,096: how many elements a projected gradient has to have for moments
            of 8 bits, beside rows of whole blocks. Here it is always 4,096.
        percentile_clipping, block_wise: only 100, and True. `step(clip_norm=...)` clips by the norm
            of all gradients.
        is_paged: only False: GaLore's states are on the card.
        seed: of the random bits, from 0 to `2**64 - 1`.

    Raises:
        ValueError: as megaopt.GaLoreAdamW; an argument that has to have one value has another.
    """

    def _translated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        size = arguments["min_8bit_size"]
        if isinstance(size, int) and size > FEWEST_IN_ROWS:
            refuse("min_8bit_size", f"at most {FEWEST_IN_ROWS}", size)
        return super()._translated(arguments)

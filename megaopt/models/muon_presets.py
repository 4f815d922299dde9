"""FusedMuon's options as the large runs have published them, by the names of their models."""

from __future__ import annotations

from typing import Any, NamedTuple


class MuonPreset(NamedTuple):
    """The options of a published run."""

    options: dict[str, Any]
    """Arguments of FusedMuon; the learning rate and the masters are the caller's."""
    groups: dict[str, Any]
    """Arguments of `muon_groups`."""
    source: str
    """The paper or report, and where else the numbers are from."""
    choices: str
    """The numbers that it does not tell, and how they are chosen here."""


MOONLIGHT = {
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": "simple",
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
    "betas": (0.9, 0.95),
    "adam_eps": 1e-8,
}

MUON_PRESETS = {
    "moonlight": MuonPreset(
        options=MOONLIGHT,
        groups={},
        source="Liu et al. 2025, arXiv:2502.16982, and its example, MoonshotAI/Moonlight",
        choices="nothing",
    ),
    "kimi_k2": MuonPreset(
        options=MOONLIGHT,
        groups={},
        source="Kimi K2, arXiv:2507.20534: update RMS 0.2, weight decay 0.1, QK-clip at 100",
        choices="momentum, iteration and AdamW's numbers, as Moonlight's; QK-clip is no option",
    ),
    "kimi_k3": MuonPreset(
        options=MOONLIGHT,
        groups={"heads": True},
        source="Kimi K3, arXiv:2607.24653, section 2.5: a matrix for each head of q, k and v",
        choices="all numbers, as Moonlight's; a head's factor takes the head's shape",
    ),
    "glm_5": MuonPreset(
        options=MOONLIGHT,
        groups={"heads": True},
        source="GLM-5, arXiv:2602.15763: MLA's up-projections are split into heads",
        choices="all numbers, as Moonlight's; k and v of one head are two matrices",
    ),
    "deepseek_v4": MuonPreset(
        options={
            **MOONLIGHT,
            "ns_coefficients": "deepseekv4",
            "ns_steps": 10,
            "adjust_lr_fn": "deepseekv4",
            "adam_eps": 1e-20,
        },
        groups={},
        source="DeepSeek-V4: eight steps and two, update RMS 0.18, momentum 0.95 with Nesterov, "
        "weight decay 0.1, AdamW with (0.9, 0.95) and 1e-20; its lr was 2.7e-4",
        choices="bf16 between products",
    ),
    "step_3_5": MuonPreset(
        options={**MOONLIGHT, "ns_coefficients": "polar_express", "precision": "fp16"},
        groups={},
        source="Step-3.5-Flash, arXiv:2602.10604, section 4.1.1: Polar Express, iterated in fp16",
        choices="five steps, and all other numbers, as Moonlight's",
    ),
}
"""Presets by name: `FusedMuon(muon_groups(model, **preset.groups), lr=lr, **preset.options)`."""

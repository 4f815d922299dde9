"""What a user writes, for `mypy --strict`; each line that it must refuse says so."""

import torch

import megaopt
from megaopt import FusedAdam, FusedLion, FusedSGD, GaLoreAdamW


def train(model: torch.nn.Module, steps: int) -> float:
    optimizer = FusedAdam(
        model.parameters(), lr=3e-4, weight_decay=0.1, dtype=torch.float32, contract="ieee"
    )
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step(clip_norm=1.0)
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    return float(loss)


def others(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    half: torch.nn.Module = megaopt.cast_model(model, torch.bfloat16)
    float8: torch.nn.Linear = megaopt.to_float8(torch.nn.Linear(16, 16), "block_128x128")
    return [
        FusedLion(half.parameters(), nonfinite="skip", backend="reference"),
        FusedSGD(float8.parameters(), lr=0.1, momentum=0.9, on_external_write="error"),
        GaLoreAdamW(
            [{"params": model.parameters(), "rank": 4}],
            proj_type="auto",
            kernel="hybrid",
            precision="tf32",
            refresh="subspace",
        ),
    ]


def mistakes(params: list[torch.nn.Parameter]) -> None:
    FusedAdam(params, contract="pytorch")  # type: ignore[arg-type]
    FusedAdam(params, backend="cuda")  # type: ignore[arg-type]
    FusedLion(params, nonfinite="ignore")  # type: ignore[arg-type]
    FusedSGD(params, weight_rounding="up")  # type: ignore[arg-type]
    FusedAdam(params, wieght_decay=0.1)  # type: ignore[call-arg]
    GaLoreAdamW(params, proj_type="full")  # type: ignore[arg-type]
    GaLoreAdamW(params, kernel="single")  # type: ignore[arg-type]
    GaLoreAdamW(params, precision="fp16")  # type: ignore[arg-type]
    GaLoreAdamW(params, refresh="qr")  # type: ignore[arg-type]
    GaLoreAdamW(params, nonfinite="ignore")  # type: ignore[arg-type]
    megaopt.to_float8(torch.nn.Linear(16, 16), "e4m3")  # type: ignore[arg-type]

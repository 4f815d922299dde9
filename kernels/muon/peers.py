"""The steps of other libraries' Muon, by torch's own operations, one matrix after another.

Contract "torch" is torch.optim.Muon of the torch that is installed, to the bit, as its own function
steps. Contract "eo" is the Muon of Emerging-Optimizers 0.2.0, as Megatron-Core 0.19 pins it, with
fp32_matmul_prec="medium".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megaopt.kernels.chunks.batch import Buffers, Formats, Scalars
from megaopt.kernels.formats import MASTERS, WEIGHTS
from megaopt.kernels.matrix.exchange import UpdateMaker
from megaopt.kernels.muon.orthogonal import EO, TORCH, Orthogonal
from megaopt.kernels.norm.reference import accumulate_reference
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.matrix import Work, joined, split
from megaopt.kernels.step.reference import controlled_grad, skips_of

Numbers = tuple[float, float, float, float]
"""momentum, nesterov, weight_decay and lr, fp64: the row of rules.muon.PEER_DIRECTION."""
COUNT = 4
Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Numbers, Orthogonal], None]
"""Steps a parameter [m, n] and its buffer in place, by a gradient; all three of one dtype."""


def step_as_torch(
    param: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor,
    numbers: Numbers,
    how: Orthogonal,
) -> None:
    """Takes torch.optim.Muon's step; of one set of coefficients for all steps."""
    from torch.optim._muon import muon  # of 2.9 and later

    momentum, nesterov, weight_decay, lr = numbers
    # lists of one parameter: torch's function steps many
    muon(
        *([param], [grad], [buffer]),
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=bool(nesterov),
        ns_coefficients=how.coefficients[0],
        eps=how.eps,
        ns_steps=len(how.coefficients),
        adjust_lr_fn=how.adjust,  # type: ignore[arg-type]  # __post_init__ knows
        has_complex=False,
    )


def step_as_eo(
    param: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor,
    numbers: Numbers,
    how: Orthogonal,
) -> None:
    """Takes OrthogonalizedOptimizer.step of fp32 parameters, with decoupled weight decay."""
    # all in fp32, in place: decay, momentum, then the update
    momentum, nesterov, weight_decay, lr = numbers
    if weight_decay:
        param.add_(param, alpha=-weight_decay * lr)
    buffer.lerp_(grad, 1 - momentum)
    # Nesterov's direction, as a mean of gradient and buffer
    direction = grad.lerp(buffer, momentum) if nesterov else buffer

    # each matrix of the parameter alone, and all back where they were
    cuts = how.cuts(direction.shape)
    updates = [_update_as_eo(matrix, how) for matrix in split(cuts, direction)]
    param.add_(joined(cuts, updates, param.shape), alpha=-lr)


def _update_as_eo(direction: torch.Tensor, how: Orthogonal) -> torch.Tensor:
    """Makes of a matrix what Megatron-Core's TensorParallelMuon does."""
    # Emerging-Optimizers' newton_schulz: [short, long], divided by its norm in fp32, then rounded
    # to bf16 once
    is_tall = direction.shape[0] > direction.shape[1]
    matrix = direction.mT if is_tall else direction
    matrix = torch.nn.functional.normalize(matrix, p=2, dim=(-2, -1), eps=how.eps)  # type: ignore[arg-type]
    matrix = matrix.bfloat16()
    for a, b, c in how.coefficients:
        # bf16 [short, short]
        gram = matrix @ matrix.mT
        if c:
            # b A + c A A
            gram, b = torch.addmm(gram, gram, gram, alpha=c, beta=b), 1.0
        # a X + B X
        matrix = torch.addmm(matrix, gram, matrix, alpha=b, beta=a)
    update = matrix.float().mT if is_tall else matrix.float()

    # two factors, multiplied one after the other: each rounds
    if how.adjust == "match_rms_adamw":  # its extra_scale_factor, beside "spectral"
        return update * math.sqrt(max(direction.shape)) * 0.2
    return update * how.ratio(direction.shape)


class PeerSteps:
    """Steps matrices as another library does, in the place of launches; MatrixPlan's `launches`."""

    many_calls = True

    def __init__(self, formats: Formats, groups: Sequence[int]) -> None:
        assert formats.matrix is not None
        self._formats, self._groups, self._how = formats, groups, formats.matrix.how
        # the rule of the row of numbers, and of how gradients are unscaled
        self._rule = formats.matrix.rule.inner
        contract, (moment,) = self._how.contract, formats.moments
        self._step: Peer = step_as_torch if contract == TORCH else step_as_eo

        # formats that these libraries do not have; master: the format of what is stepped
        master = formats.master if formats.master.present else formats.weight
        if formats.cast or master not in (MASTERS["float32"], *WEIGHTS.values()):
            raise ValueError(
                f"contract {contract!r} must have fp32 masters or none, got {formats.master.name}"
            )
        # the momentum is in the dtype of what is stepped
        if moment.name != master.name:
            raise ValueError(
                f"contract {contract!r} must have momentum_buffer_dtype {master.dtype}, that of "
                f"the parameter, got {moment.name}"
            )
        if contract == EO and master.dtype != torch.float32:
            raise ValueError(
                f"contract 'eo' must have fp32 parameters or masters, got {master.dtype}"
            )

    def accumulate(self, buffers: Buffers, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        accumulate_reference(buffers["grad"], bins)

    @torch.no_grad()
    def step(
        self, buffers: Buffers, works: Sequence[Work], scalars: Scalars, controls: Any
    ) -> None:
        """Takes one step of every parameter; raises ValueError for numbers on the device."""
        if isinstance(scalars, torch.Tensor):
            raise ValueError(
                f"contract {self._how.contract!r} must have its numbers on the host: without "
                "capturable=True, and lr as a number"
            )
        # the host waits for the controls
        left_out = skips_of(controls, len(scalars))
        formats, length = self._formats, self._rule.row_length
        for index, group in enumerate(self._groups):
            # empty parameters have no step
            if left_out[group] or not buffers["weight"][index].numel():
                continue
            tensors = {slot: matrices[index] for slot, matrices in buffers.items()}
            # the master is stepped if there is one, else the weight
            param = tensors.get("master", tensors["weight"]).detach()
            row = None if controls is None else controls[group]
            grad = controlled_grad(tensors["grad"], row, formats, self._rule).to(param.dtype)
            # behind those of others in the row
            numbers: Any = scalars[group][:length][-COUNT:]
            self._step(param, grad, tensors["momentum_buffer"], numbers, self._how)
            # the weight is the master, rounded
            if "master" in tensors:
                tensors["weight"].detach().copy_(formats.weight.encode_reference(param))


# --- among ranks: contract "eo"


class PeerPlan:
    """Steps parts of matrices elementwise: their momentum, or weights by updates."""

    def __init__(self, formats: Formats, rule: Rule, groups: Sequence[int]) -> None:
        self.formats, self._rule, self._groups = formats, rule, groups
        self._buffers: Buffers = {}

    @classmethod
    def plan(
        cls, formats: Formats, rule: Rule, numels: Any, groups: Sequence[int], *_: Any
    ) -> PeerPlan:
        """Makes the plan of some tensors, as kernels.backends do."""
        return cls(formats, rule, groups)

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step."""
        self._buffers = buffers

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of the gradients to the bins of megaopt.kernels.norm."""
        accumulate_reference(self._buffers["grad"], bins)

    @torch.no_grad()
    def step(self, scalars: Scalars, controls: torch.Tensor | None = None) -> None:
        """Takes one step; numbers are on the host."""
        # the host waits for the controls
        left_out = skips_of(controls, len(scalars))
        for index, group in enumerate(self._groups):
            if left_out[group]:
                continue
            # parts [numbers] of one parameter; several may have one group
            tensors = {slot: parts[index] for slot, parts in self._buffers.items()}
            momentum, nesterov, weight_decay, lr = scalars[group][: self._rule.row_length][-COUNT:]
            if self._rule.moments:
                # before messages: the momentum is stepped, and the direction goes where it is sent
                # from; fp32 [numbers of the part], as what is elementwise needs no whole matrix
                row = None if controls is None else controls[group]
                grad = controlled_grad(tensors["grad"], row, self.formats, self._rule)
                buffer = tensors["momentum_buffer"]
                buffer.lerp_(grad, 1 - momentum)
                tensors["weight"].copy_(grad.lerp(buffer, momentum) if nesterov else buffer)
                continue
            # behind them, as step_as_eo: decay, then the update, which is in the gradient's place
            param = tensors.get("master", tensors["weight"])
            if weight_decay:
                param.add_(param, alpha=-weight_decay * lr)
            param.add_(tensors["grad"], alpha=-lr)
            if "master" in tensors:
                tensors["weight"].copy_(self.formats.weight.encode_reference(param))


class PeerMaking(UpdateMaker):
    """The steps of ranks that share matrices, as in Emerging-Optimizers' "duplicated" mode."""

    plans = PeerPlan

    def make(
        self,
        wholes: list[torch.Tensor],
        pieces: Any,
        indices: Sequence[int],
        notes: Any,
        states: Any,
    ) -> list[torch.Tensor]:
        """Makes the updates of whole matrices."""
        # an owner has whole matrices [rows, columns], whose updates have the bits of one process
        return [_update_as_eo(whole, self.matrix.how) for whole in wholes]

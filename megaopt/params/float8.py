"""fp8 weights as parameters: ours and other libraries', whole or a rank's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaopt.float8.shard import Float8Shard
from megaopt.kernels.chunks.batch import Extent, Formats
from megaopt.kernels.float8 import dequantize_reference
from megaopt.kernels.formats import Format
from megaopt.kernels.formats.float8_drawn import remainder_of
from megaopt.kernels.quantizers.scale import multiplied
from megaopt.kernels.rules.adam_ieee import canonical_reference
from megaopt.options.options import Options
from megaopt.params.codes import decoded_joined
from megaopt.params.view import ParamView

if TYPE_CHECKING:
    from megaopt.kernels.rules.matrix import Matrix


class Float8View(ParamView):
    """A parameter that is a whole fp8 weight, or, as a Float8Shard, a rank's part of one."""

    def __init__(self, param: Any, weight: Any, matrix: Matrix | None = None) -> None:
        self.weight = weight
        super().__init__(param, matrix)
        self.code_dtype = weight.recipe.dtype
        # a part has an order, by which ranks know it; None: they have all parts in one order
        self._is_shard = isinstance(param, Float8Shard)
        start = int(param.start) if self._is_shard else 0
        # scales are of rows, columns or blocks: the step asks where its elements lie in these
        columns = weight.shape[-1] if weight.shape else 1
        rows = weight.shape.numel() // max(columns, 1)
        self.extent = Extent(rows, columns, start, self._is_shard)
        # codes of the whole weight, flat; of these the elements of this part, a view
        self.codes = weight.data8.view(-1)[start : start + param.numel()]
        # the ranks that share the weight; None where there are no others
        if self._is_shard and dist.is_initialized():
            group = param.group or dist.group.WORLD
            self.group = group if dist.get_world_size(group) > 1 else None

    def reader(self) -> Callable[[], Sequence[Any]]:
        """Reads, in about a microsecond, all tensors that the weight is made of now."""
        param, made_of = self.param, self.weight.made_of
        # the weight of a part may become another
        return (lambda: (param.weight, *made_of())) if self._is_shard else made_of

    def number(self, place: int) -> int:
        """The `order` of a part among the weights of its group; its place where it has none."""
        if not self._is_shard:
            return super().number(place)
        return place if self.param.order is None else int(self.param.order)

    def value(self, formats: Formats, initial: bool = False) -> torch.Tensor:
        """The values that the codes stand for; exact where the step reads them so.

        initial: those that the weight was made from, if it still has them.
        """
        weight = self.weight
        values = weight.high_precision_initial_value() if initial else None
        if values is None and formats.cast is not None and formats.cast.exact:
            # code * scale_inv in fp32, no rounding to the weight's dtype
            facts = weight.data8, weight.scale_inv, weight.recipe, torch.float32
            values = dequantize_reference(*facts)
        # in the weight's own dtype first, where the step reads values so
        return self.part_of(weight.dequantize() if values is None else values)

    def scale_inv(self) -> torch.Tensor:
        """Returns the factor of the code of each element, fp32, of the parameter's shape."""
        # ones of the weight's shape, times the scale of each block: fp32
        weight = self.weight
        inverse = weight.recipe.quantizer.value_reference(weight.scale_inv)
        whole = torch.ones(weight.shape, dtype=torch.float32, device=weight.data8.device)
        return self.part_of(multiplied(whole, inverse, weight.recipe.block))

    def joined_value(self, form: Format, code: torch.Tensor) -> torch.Tensor:
        """The fp32 values of codes with what is stored beside them."""
        codes = self.codes.view(self.param.shape)
        return canonical_reference(decoded_joined(form, codes, code) * self.scale_inv())

    def join(self, form: Format, value: torch.Tensor, code: torch.Tensor) -> torch.Tensor | None:
        """Stores in `code` what brings the codes, which stay, nearest to fp32 values; None."""
        # the codes stay: what is beside them gets the rest of the scaled value
        scaled = value * (1.0 / self.scale_inv())
        codes = self.codes.view(self.param.shape)
        code.copy_(remainder_of(codes, scaled))
        return None

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its elements of a tensor of the whole weight's shape, as fp32."""
        start = self.first_of()
        part = whole.flatten()[start : start + self.param.numel()]
        return part.view(self.param.shape).float()

    def _check_kind(self, where: str, options: Options, forms: Mapping[str, Format]) -> None:
        """Raises ValueError for parts that lack what a step of codes needs."""
        count, whole = self.param.numel(), self.weight.shape.numel()
        if self.weight.columnwise and count != whole:
            raise ValueError(
                f"{where}: a weight with columnwise data must be whole, got {count} of {whole} "
                "elements"
            )
        for name, form in forms.items() if self._is_shard else ():
            if form.block and self.keeps_blocks(form):
                raise ValueError(
                    f"{where}: {name}={form.name!r} must not be given for fp8 weights of "
                    "which other ranks have parts, where these cut blocks; torch.bfloat16, or "
                    "'bfloat16_stochastic'"
                )

    def check_shared(self, where: str) -> None:
        """Raises ValueError for a part whose other parts no rank is known to hold."""
        param, whole = self.param, self.weight.shape.numel()
        if param.numel() == whole or self.group is not None:
            return
        reason = "its group has no other" if dist.is_initialized() else "there is no process group"
        raise ValueError(
            f"{where}: an fp8 weight must be whole, or have a group of the ranks that hold the "
            f"rest, on torch.distributed, got elements {param.start} to "
            f"{param.start + param.numel()} of {whole} where {reason}"
        )

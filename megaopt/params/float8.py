"""fp8 weights as parameters: ours and other libraries', whole or a rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megaopt.kernels.chunks.batch import Cast, Extent, Formats
from megaopt.kernels.float8 import dequantize_reference
from megaopt.kernels.formats import Format
from megaopt.kernels.formats.float8_drawn import encode_pair_reference, remainder_of
from megaopt.kernels.quantizers.scale import multiplied
from megaopt.kernels.rules.adam_ieee import canonical_reference
from megaopt.kernels.rules.matrix import Matrix
from megaopt.options.options import Options
from megaopt.params.codes import decoded_joined
from megaopt.params.view import MatrixView, ParamView


class Float8View(ParamView):
    """A parameter that is a whole fp8 weight."""

    def __init__(self, param: Any, weight: Any) -> None:
        super().__init__(param)
        self.weight = weight

    @property
    def codes(self) -> torch.Tensor:
        """The codes of its elements, flat, a view of the weight's."""
        # data8: codes of the whole weight; this view is flat, [numel of the part]
        start = self.first_element
        elements: torch.Tensor = self.weight.data8.view(-1)[start : start + self.param.numel()]
        return elements

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The whole weight's shape."""
        return tuple(self.weight.shape)

    @property
    def first_element(self) -> int:
        """0: it is whole."""
        return 0

    @property
    def batch_key(self) -> tuple[object, ...]:
        """The ranks, the library, and whether there are codes along columns."""
        return self.group, type(self.weight), self.weight.columnwise is not None

    @property
    def counted(self) -> list[torch.Tensor]:
        """The weight, if it is ours: nobody says what counts writes to another library's."""
        return [] if self.weight.is_foreign else [self.weight]

    def reader(self) -> Callable[[], Sequence[Any]]:
        """Reads, in about a microsecond, all tensors that the weight is made of now."""
        read: Callable[[], Sequence[Any]] = self.weight.made_of
        return read

    def cast(self, direct: bool | None = None) -> Cast | None:
        """The cast by the weight's recipe."""
        recipe = self.weight.recipe
        recipe = recipe if direct is None else replace(recipe, direct=direct)
        return Cast(recipe, self.weight.dtype)

    @property
    def extent(self) -> Extent:
        """All elements of the weight."""
        # scales are of rows, columns or blocks: the step asks where its elements lie in these
        weight = self.weight
        columns = weight.shape[-1] if weight.dim() else 1
        rows = weight.numel() // max(columns, 1)
        return Extent(rows, columns, self.first_element, self._has_other_parts)

    _has_other_parts = False

    def value(self, formats: Formats) -> torch.Tensor:
        """The values that the codes stand for; exact where the step reads them so."""
        # in the weight's own dtype first, where the step reads values so
        if formats.cast is None or not formats.cast.exact:
            return self.part_of(self.weight.dequantize())
        # code * scale_inv in fp32, no rounding to the weight's dtype
        weight = self.weight
        values = dequantize_reference(weight.data8, weight.scale_inv, weight.recipe, torch.float32)
        return self.part_of(values)

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

    def round_as_pairs(self, value: torch.Tensor) -> None:
        """Sets codes of fp32 values to those that a step stores with a remainder beside each.

        They are nearest, in two roundings, ties away from zero; the weight's own are to even.
        """
        code, _ = encode_pair_reference(value * (1.0 / self.scale_inv()))
        self.codes.copy_(code.view(-1))

    def initial_value(self, formats: Formats) -> torch.Tensor:
        """The values that the weight was made from, if it still has them; else the codes'."""
        values = self.weight.high_precision_initial_value()
        return self.value(formats) if values is None else self.part_of(values)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its elements of a tensor of the whole weight's shape, as fp32."""
        start = self.first_element
        part = whole.flatten()[start : start + self.param.numel()]
        return part.view(self.param.shape).float()

    def _check_kind(
        self, where: str, options: Options, moments: tuple[str, ...], masters: bool
    ) -> None:
        count, whole = self.param.numel(), self.weight.numel()
        if self.weight.columnwise and count != whole:
            raise ValueError(
                f"{where}: a weight with columnwise data must be whole, got {count} of {whole} "
                "elements"
            )


class Float8MatrixView(MatrixView, Float8View):
    """A whole fp8 weight that is stepped as a matrix: its master is."""

    def __init__(self, param: Any, weight: Any, matrix: Matrix) -> None:
        Float8View.__init__(self, param, weight)
        self.matrix = matrix


class Float8ShardView(Float8View):
    """A parameter that is a rank's part of an fp8 weight."""

    _has_other_parts = True

    def _check_kind(
        self, where: str, options: Options, moments: tuple[str, ...], masters: bool
    ) -> None:
        super()._check_kind(where, options, moments, masters)
        for name in moments:
            form = options.moment_format(name)
            if form.block and self.keeps_blocks(form):
                raise ValueError(
                    f"{where}: {name}_dtype={form.name!r} must not be given for fp8 weights of "
                    "which other ranks have parts, where these cut blocks; torch.bfloat16, or "
                    "'bfloat16_stochastic'"
                )

    @property
    def first_element(self) -> int:
        """The first element of this part in the weight."""
        return int(self.param.start)

    @property
    def group(self) -> Any:
        """The ranks that share the weight; None where there are no others."""
        if not dist.is_initialized():
            return None
        group = self.param.group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    def reader(self) -> Callable[[], Sequence[Any]]:
        """Reads the weight too, which may become another."""
        param, made_of = self.param, self.weight.made_of
        return lambda: (param.weight, *made_of())

    def number(self, place: int) -> int:
        """Its `order` among the weights of the group; its place where it has none."""
        return place if self.param.order is None else int(self.param.order)

    def check_shared(self, where: str) -> None:
        """Raises ValueError for a part whose other parts no rank is known to hold."""
        param, whole = self.param, self.weight.numel()
        if param.numel() == whole or self.group is not None:
            return
        reason = "its group has no other" if dist.is_initialized() else "there is no process group"
        raise ValueError(
            f"{where}: an fp8 weight must be whole, or have a group of the ranks that hold the "
            f"rest, on torch.distributed, got elements {param.start} to "
            f"{param.start + param.numel()} of {whole} where {reason}"
        )

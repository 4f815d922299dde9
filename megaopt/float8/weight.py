"""A weight that is fp8 codes and scales, and a tensor of its own dtype to everybody else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megaopt.float8.operations import call, dispatch
from megaopt.kernels.float8 import (
    RECIPES,
    Float8Recipe,
    dequantize_reference,
    quantize_reference,
)
from megaopt.kernels.quantizers.delayed import move_scales_reference
from megaopt.kernels.quantizers.scale import amax_reference, scale_from_amax_reference
from megaopt.options.overwriting import overwrite

TENSORS = ("data8", "scale_inv", "scale", "amax_history")
"""The tensors of a Float8Weight; without delayed scaling the last two are None."""
READ_TENSORS = operator.attrgetter(*TENSORS)


def named_recipe(recipe: Float8Recipe | str) -> Float8Recipe:
    """A recipe, by name or as it is; raises ValueError for another name, TypeError for neither."""
    if isinstance(recipe, Float8Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a Float8Recipe or a name, got {recipe!r}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    return RECIPES[recipe]


class Float8Weight(Tensor):
    """A tensor of `dtype` (torch.bfloat16, say) that is kept as fp8 codes; it can be a parameter.

    Operations read what `dequantize` gives and return plain tensors; a view is a view of that, not
    of the codes. Operations in place are refused with TypeError, but for `copy_`: from a
    Float8Weight of the same recipe it copies codes and scales; what is plain it quantizes.
    F.linear has a gradient of its own; gradients are plain tensors of `dtype`.

    state_dict, torch.save, pickle and copy.deepcopy keep codes and scales exactly. A plain weight
    that loads a Float8Weight's state gets the dequantized values.
    """

    data8: Tensor
    """The codes: the recipe's dtype, the weight's shape, contiguous."""
    scale_inv: Tensor
    """The factor of codes: fp32, the recipe's `scale_shape` ((1,), or one a block); for
    mxfp8 the E8M0 code, uint8."""
    scale: Tensor | None
    """Delayed scaling: what the next values will be multiplied by; fp32, (1,). Else None."""
    amax_history: Tensor | None
    """Delayed scaling: fp32, (amax_history_len,), the amax since `update_scales` first, then the
    oldest to the newest. Else None."""
    recipe: Float8Recipe
    is_foreign = False
    """It is not another library's: the step moves its scales, and torch counts writes to it."""
    columnwise = None
    """There are no second codes along columns."""
    _initial: list[Tensor]  # shared with detached aliases: at most one tensor

    @staticmethod
    def __new__(
        cls: type[Float8Weight],
        data8: Tensor,
        scale_inv: Tensor,
        scale: Tensor | None,
        amax_history: Tensor | None,
        recipe: Float8Recipe,
        dtype: torch.dtype = torch.bfloat16,
        requires_grad: bool = False,
    ) -> Float8Weight:
        """Puts together what is there; `from_values` makes one from numbers."""
        weight: Float8Weight = Tensor._make_wrapper_subclass(
            cls, data8.shape, dtype=dtype, device=data8.device, requires_grad=requires_grad
        )
        weight.data8, weight.scale_inv, weight.recipe = data8, scale_inv, recipe
        weight.scale, weight.amax_history = scale, amax_history
        weight._initial = []
        # by tensor the dtype and shape that the recipe wants; None: the tensor has to be None
        shape = recipe.scale_shape(weight.shape)
        kinds: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {
            "data8": (recipe.dtype, tuple(weight.shape)),
            "scale_inv": (recipe.quantizer.scale_dtype, shape),
            "scale": None,
            "amax_history": None,
        }
        if recipe.quantizer.keeps_scale:
            kinds["scale"] = (torch.float32, shape)
            kinds["amax_history"] = (torch.float32, (recipe.amax_history_len,))
        for name, allowed in kinds.items():
            tensor = getattr(weight, name)
            kind = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
            if kind != allowed:
                raise ValueError(
                    f"{name} must be {allowed} with scaling={recipe.scaling!r}, got {kind}"
                )
        return weight

    @classmethod
    def from_values(
        cls,
        values: Tensor,
        recipe: Float8Recipe | str,
        *,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> Float8Weight:
        """A weight of these values, which it keeps as `high_precision_initial_value`.

        With delayed scaling, which has no amax to go by yet, the first scale is that of the values
        themselves, and their amax the first of the history.

        Args:
            values: bf16, fp16 or fp32; two dimensions for block scaling.
            recipe: a recipe or its name.
            dtype: the weight's; None: the values'.
            requires_grad: of the weight.

        Raises:
            ValueError: another dtype, other than two dimensions with block scaling, or an unknown
                name.
        """
        recipe = named_recipe(recipe)
        dtype = values.dtype if dtype is None else dtype
        for name, value_dtype in (("values.dtype", values.dtype), ("dtype", dtype)):
            if value_dtype not in (torch.bfloat16, torch.float16, torch.float32):
                allowed = "torch.bfloat16, torch.float16 or torch.float32"
                raise ValueError(f"{name} must be {allowed}, got {value_dtype}")

        # delayed scaling: fp32 scale, and history [amax_history_len], first the latest amax
        values = values.detach()
        scale = history = None
        if recipe.quantizer.keeps_scale:
            history = values.new_zeros(recipe.amax_history_len, dtype=torch.float32)
            # the amax of what is encoded: values as they are, or rounded to the weight's dtype
            encoded = values.float() if recipe.direct else values.to(dtype).float()
            scale = scale_from_amax_reference(amax_reference(encoded, recipe), recipe.code_max)

        # codes in the recipe's fp8 dtype, of the values' shape, and factors that bring them back
        quantized = quantize_reference(values, recipe, dtype, scale)
        if history is not None:
            history[:1] = quantized.amax
        weight = cls(
            quantized.codes, quantized.scale_inv, scale, history, recipe, dtype, requires_grad
        )
        # the optimizer's master starts from these
        weight._initial.append(values)
        return weight

    @property
    def owner(self) -> Tensor:
        """The tensor that autograd knows: itself."""
        return self

    def made_of(self) -> tuple[Tensor | None, ...]:
        """The tensors behind it, as they are now; in about a microsecond."""
        tensors: tuple[Tensor | None, ...] = READ_TENSORS(self)
        return tensors

    # --- values

    @property
    def latest_amax(self) -> Tensor | None:
        """Delayed scaling: the largest magnitude since `update_scales`; a view, fp32, (1,)."""
        return None if self.amax_history is None else self.amax_history[:1]

    def dequantize(self) -> Tensor:
        """The numbers: code * scale_inv, rounded to fp32, then to `dtype`; a plain tensor."""
        with torch.no_grad():
            return dequantize_reference(self.data8, self.scale_inv, self.recipe, self.dtype)

    @torch.no_grad()
    def quantize_(self, values: Tensor, dtype: torch.dtype | None = None) -> Float8Weight:
        """Becomes these values, in place; with delayed scaling their amax joins `latest_amax`.

        Args:
            values: the weight's shape; any floating dtype.
            dtype: what values are rounded to first, unless the recipe is direct; None: the
                weight's. torch.float32: they are not.

        Raises:
            ValueError: another shape, or no floating dtype; nothing has changed then.
        """
        if values.shape != self.shape or not values.is_floating_point():
            raise ValueError(
                f"values must have shape {tuple(self.shape)} and a floating dtype, got shape "
                f"{tuple(values.shape)} and {values.dtype}"
            )
        # new tensors first: an error leaves the weight as it was
        local_values = values.to(self.device)
        quantized = quantize_reference(local_values, self.recipe, dtype or self.dtype, self.scale)
        pairs = [(self.data8, quantized.codes), (self.scale_inv, quantized.scale_inv)]
        # the amax since update_scales: the larger one
        if self.latest_amax is not None:
            pairs.append((self.latest_amax, torch.maximum(self.latest_amax, quantized.amax)))
        # all of them at once, or none
        overwrite(pairs, self.values_changed)
        return self

    def values_changed(self) -> None:
        """Tells autograd and the initial value that codes were written; nothing waits."""
        self.codes_changed()
        torch.autograd.graph.increment_version(self)

    def codes_changed(self) -> None:
        """Drops the initial value, as codes were written; autograd is told elsewhere."""
        self._initial.clear()

    def high_precision_initial_value(self) -> Tensor | None:
        """The values that the weight was made of, not rounded to fp8: what its master starts from.

        None once they were dropped, or the weight has become others. Copies and pickles have it;
        what loads a state dict has not.
        """
        return self._initial[0] if self._initial else None

    def drop_high_precision_initial_value(self) -> None:
        """Frees the initial value: there is a master now."""
        self._initial.clear()

    # --- as a tensor

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that it is made of, by name, without those that are None."""
        members = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in members.items() if tensor is not None}

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Float8Weight:
        """Makes a weight of the tensors that the function gives for its own."""
        tensors = {name: function(tensor) for name, tensor in self.tensors().items()}
        return _put_together(tensors, self.recipe, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Float8Recipe, torch.dtype, bool]]:
        return list(self.tensors()), (self.recipe, self.dtype, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor],
        context: tuple[Float8Recipe, torch.dtype, bool],
        size: Sequence[int],
        stride: Sequence[int],
    ) -> Float8Weight:
        recipe, dtype, requires_grad = context
        return _put_together(tensors, recipe, dtype, requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what its printer passes
        return (
            f"Float8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"recipe={self.recipe})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Weight:
        # tied weights: one copy for all
        if id(self) not in memo:
            copied = self._mapped(torch.clone)
            copied._initial = [value.clone() for value in self._initial]
            memo[id(self)] = _finished(copied, self.requires_grad, isinstance(self, _PARAMETER))
        copy: Float8Weight = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_parameter = isinstance(self, _PARAMETER)
        recipe_fields = {
            name: getattr(self.recipe, name) for name in self.recipe.__dataclass_fields__
        }
        # plain pickle cannot write fp8 storages
        parts = self.tensors() | {"data8": self.data8.view(torch.uint8)}
        arguments = (
            parts,
            recipe_fields,
            self.dtype,
            self.requires_grad,
            is_parameter,
            list(self._initial),
        )
        return _rebuild, arguments

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a stand-in
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})


# --- saved and loaded

_PARAMETER = torch.nn.Parameter


def _put_together(
    tensors: dict[str, Tensor],
    recipe: Float8Recipe,
    dtype: torch.dtype,
    requires_grad: bool = False,
) -> Float8Weight:
    scale, history = tensors.get("scale"), tensors.get("amax_history")
    return Float8Weight(
        tensors["data8"], tensors["scale_inv"], scale, history, recipe, dtype, requires_grad
    )


def _finished(weight: Float8Weight, requires_grad: bool, is_parameter: bool) -> Float8Weight:
    tensor: Any = torch.nn.Parameter(weight, requires_grad) if is_parameter else weight
    new_weight: Float8Weight = tensor.requires_grad_(requires_grad)
    return new_weight


def _rebuild(
    tensors: dict[str, Tensor],
    recipe_fields: dict[str, Any],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    initial: Sequence[Tensor] = (),
) -> Float8Weight:
    recipe = Float8Recipe(**recipe_fields)
    tensors = tensors | {"data8": tensors["data8"].view(recipe.dtype)}
    weight = _put_together(tensors, recipe, dtype)
    weight._initial = list(initial)
    return _finished(weight, requires_grad, is_parameter)


torch.serialization.add_safe_globals([_rebuild])  # it runs nothing but the checks of what it makes

# --- delayed scaling


@torch.no_grad()
def update_scales(weight: Float8Weight, skip: torch.Tensor | None = None) -> None:
    """Delayed scaling, once a step: the next scale from the amaxes so far, which move on by one.

    As TransformerEngine: the first of the history, the amax since the last call, becomes its last,
    all others move towards the front, and the first is 0. The scale becomes the recipe's code_max /
    amax; where amax is 0, infinity or NaN it stays. Codes and `scale_inv` belong together and stay,
    too. On the device; nothing waits.

    Args:
        weight: with delayed scaling.
        skip: one boolean on the weight's device; where it is true nothing moves.

    Raises:
        ValueError: another recipe: its scales come from the values.
    """
    history, scale, recipe = weight.amax_history, weight.scale, weight.recipe
    if history is None or scale is None:
        raise ValueError(f"scaling must be 'delayed', got {recipe.scaling!r}")
    move_scales_reference(history, scale, recipe, skip)

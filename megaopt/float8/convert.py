"""Models whose weights become fp8."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from megaopt.float8.operations import is_float8
from megaopt.float8.weight import Float8Weight, named_recipe
from megaopt.kernels.float8 import Float8Recipe
from megaopt.options.choices import Recipe
from megaopt.options.placement import REPLACED

Filter = Callable[[str, nn.Linear], bool]
Module = TypeVar("Module", bound=nn.Module)

logger = logging.getLogger("megaopt")


class Float8Linear(nn.Linear):
    """A torch.nn.Linear whose printed form shows how its weight is kept."""

    def extra_repr(self) -> str:
        """Returns torch.nn.Linear's, and the recipe while the weight is in fp8."""
        recipe: Any = getattr(self.weight, "recipe", None)
        suffix = "" if recipe is None else f", fp8 weight={recipe.scaling}"
        return super().extra_repr() + suffix


def sizes_of_16(name: str, module: nn.Linear) -> bool:
    """Whether both sizes of the weight are multiples of 16, as products in fp8 want them."""
    return all(size % 16 == 0 for size in module.weight.shape)


def to_float8(
    module: Module, recipe: Float8Recipe | Recipe, *, filter: Filter = sizes_of_16
) -> Module:
    """Makes the weights of linear layers Float8Weight parameters, in place.

    A weight keeps its dtype, requires_grad, attributes and, for an optimizer's master, its values:
    `high_precision_initial_value`. Optimizers are made afterwards: the parameters are new ones, and
    an optimizer that has the old ones raises RuntimeError at its next step. A weight that several
    layers share stays shared. Layers that filter does not choose stay as they are: by default those
    whose weight has a size that is no multiple of 16. The logger "megaopt" is told how many weights
    were converted; which linear layers the default filter left it says as a warning, which Python
    prints unless logging is set up otherwise. print(module) shows what is in fp8.

    Args:
        module: a model, or a layer; weights of fp32, bf16 or fp16.
        recipe: a Float8Recipe or its name, of RECIPES.
        filter: which layers: called with each torch.nn.Linear's name in the model ("" is the module
            itself) and the layer. By default those whose in_features and out_features are both
            multiples of 16.

    Returns:
        The module.

    Raises:
        ValueError: an unknown recipe's name; a weight of another dtype than bf16, fp16 and fp32, or
            one that is shared with what is no such layer. Nothing has changed then.
    """
    # all that is refused is refused before the first weight changes
    recipe = named_recipe(recipe)
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and not is_float8(layer.weight)
        if filter(name, layer)
    }
    # every other owner of a weight that changes, an embedding tied to the output layer, say
    names = {layer.weight: name for name, layer in layers.items()}
    for name, owner in module.named_modules():
        for param_name, param in owner.named_parameters(recurse=False):
            if param in names and not (name in layers and param_name == "weight"):
                raise ValueError(
                    f"the weight of {names[param]!r} must be that of chosen layers alone, got "
                    f"one that is also {param_name!r} of {name!r}, which would stay as it is; "
                    "leave it out by `filter`"
                )
    # shared weights: one fp8 weight for all layers that have the old one
    weights: dict[Tensor, nn.Parameter] = {}
    for layer in layers.values():
        weight = layer.weight
        if weight not in weights:
            float8_weight = Float8Weight.from_values(weight, recipe)
            weights[weight] = nn.Parameter(float8_weight, weight.requires_grad)
            for name, value in vars(weight).items():  # as model parallelism marks parameters
                setattr(weights[weight], name, value)
    for name, layer in layers.items():
        old, layer.weight = layer.weight, weights[layer.weight]
        # an optimizer that holds the old weight finds the mark at its next step, and raises
        setattr(old, REPLACED, f"{name}.weight".removeprefix("."))
        if type(layer) is nn.Linear:
            layer.__class__ = Float8Linear
    _tell(module, recipe, layers, filter is sizes_of_16)
    return module


def _tell(
    module: nn.Module, recipe: Float8Recipe, layers: dict[str, nn.Linear], by_default: bool
) -> None:
    """Logs what was converted, and as a warning which linear layers nobody chose to leave."""
    done = f"to_float8: {len(layers)} linear layers have fp8 weights now ({recipe.scaling})"
    # only the default filter leaves layers that nobody chose
    left = [
        f"{name or 'the module'} ({' x '.join(map(str, layer.weight.shape))})"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and not is_float8(layer.weight)
    ]
    if not (left and by_default):
        logger.info(done)
        return
    more = f" and {len(left) - 8} more" if len(left) > 8 else ""
    logger.warning(
        "%s; %d stay as they are, as a size is no multiple of 16: %s%s",
        *(done, len(left), ", ".join(left[:8]), more),
    )

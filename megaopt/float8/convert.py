"""Models whose weights become fp8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor, nn

from megaopt.float8.operations import is_float8
from megaopt.float8.weight import Float8Weight, named_recipe
from megaopt.kernels.float8 import Float8Recipe

Filter = Callable[[str, nn.Linear], bool]
Module = TypeVar("Module", bound=nn.Module)


def sizes_of_16(name: str, module: nn.Linear) -> bool:
    """Whether both sizes of the weight are multiples of 16, as products in fp8 want them."""
    return all(size % 16 == 0 for size in module.weight.shape)


def to_float8(
    module: Module, recipe: Float8Recipe | str, *, filter: Filter = sizes_of_16
) -> Module:
    """Makes the weights of linear layers Float8Weight parameters, in place.

    A weight keeps its dtype, requires_grad, attributes and, for an optimizer's master, its values:
    `high_precision_initial_value`. Optimizers are made afterwards: the parameters are new ones. A
    weight that several layers share stays shared. Layers that filter does not choose stay as they
    are, and nothing is printed: by default those whose weight has a size that is no multiple of 16.

    Args:
        module: a model, or a layer; weights of fp32, bf16 or fp16.
        recipe: a Float8Recipe or its name, of RECIPES.
        filter: which layers: called with each torch.nn.Linear's name in the model ("" is the module
            itself) and the layer. By default those whose in_features and out_features are both
            multiples of 16.

    Returns:
        The module.

    Raises:
        ValueError: another recipe's name; a weight whose dtype is not allowed, or that is shared
            with what is no such layer. Nothing has changed then.
    """
    recipe = named_recipe(recipe)
    layers = dict(_chosen(module, filter))
    _check_shared(module, layers)
    made: dict[Tensor, nn.Parameter] = {}
    for layer in layers.values():
        if layer.weight not in made:
            made[layer.weight] = _float8_of(layer.weight, recipe)
    for layer in layers.values():
        layer.weight = made[layer.weight]
    return module


def _chosen(module: nn.Module, filter: Filter) -> Iterator[tuple[str, nn.Linear]]:
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) or is_float8(layer.weight):
            continue
        if filter(name, layer):
            yield name, layer


def _check_shared(module: nn.Module, layers: dict[str, nn.Linear]) -> None:
    weights = {layer.weight: name for name, layer in layers.items()}
    for name, owner in module.named_modules():
        for own, param in owner.named_parameters(recurse=False):
            if param in weights and not (name in layers and own == "weight"):
                raise ValueError(
                    f"the weight of {weights[param]!r} is not allowed: it is also "
                    f"{own!r} of {name!r}, which would stay as it is; leave it out by `filter`"
                )


def _float8_of(weight: Tensor, recipe: Float8Recipe) -> nn.Parameter:
    made = nn.Parameter(Float8Weight.from_values(weight, recipe), weight.requires_grad)
    for name, value in vars(weight).items():  # as model parallelism marks parameters
        setattr(made, name, value)
    return made

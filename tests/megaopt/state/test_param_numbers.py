"""The numbers by which parameters draw their random bits: checked, edited, and loaded."""

import copy

import pytest
import torch
from handling import copy_weights, refused
from runs import BF16, assert_same, give_gradients, parameters, params_of, snapshot, train, values
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam, FusedSGD


def made(params, **more):
    return FusedSGD(params, **{"lr": 2e-3, "weight_rounding": "stochastic", "seed": 11, **more})


def test_parameters_that_would_draw_the_same_are_refused():
    """With the number, both parameters, and what helps; nothing has changed."""
    params = parameters([(8,), (8,), (8,)])
    late = {"params": params[2:], "param_numbers": [1]}
    one, other = "parameter 0 of group 1", "parameter 1 of group 0"
    reason = "number 1, by which random bits are drawn, must be its own, got that of"
    remedy = "at elements that both have; param_numbers of a group sets others"
    message = "|".join(f"{a}: {reason} {b}, {remedy}" for a, b in ((one, other), (other, one)))
    with pytest.raises(ValueError, match=message):
        made([{"params": params[:2]}, late])
    optimizer = made(params[:2])
    with refused(optimizer, message):
        optimizer.add_param_group(late)
    assert late == {"params": params[2:], "param_numbers": [1]}
    optimizer.add_param_group({**late, "param_numbers": [2]})
    give_gradients(params, 0)
    optimizer.param_groups[1]["param_numbers"] = [1]
    with refused(optimizer, message):
        optimizer.step()
    params[2].megaopt_first_element = 7
    with pytest.raises(ValueError, match="at elements that both have"):
        optimizer.step()
    params[2].megaopt_first_element = 8
    optimizer.step()


def test_without_random_bits_numbers_may_be_the_same():
    params = parameters([(8,), (8,)])
    optimizer = FusedAdam([{"params": params, "param_numbers": [1, 1]}])
    train(optimizer, 1)
    assert "seed" not in optimizer.param_groups[0]


@pytest.mark.parametrize("numbers", [[1], [1, 2.0], [1, -1], [1, 2**32], "ab", [1, True]], ids=str)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_param_numbers_are_whole_numbers_of_32_bits_one_each(numbers, rounding):
    """Also where nothing draws."""
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    group = {"params": params, "param_numbers": numbers}
    allowed = r"group 0: param_numbers must be a list of 2 whole numbers from 0 to 2\*\*32 - 1, got"
    with pytest.raises(ValueError, match=allowed):
        FusedAdam([group], master_weights=False, weight_rounding=rounding)
    optimizer = FusedAdam([{**group, "param_numbers": [3, 4]}], weight_rounding=rounding)
    train(optimizer, 1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.param_groups[0]["param_numbers"] = numbers
    with refused(optimizer, allowed):
        optimizer.step()


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("in_place", [True, False])
def test_edited_param_numbers_are_those_of_the_next_step(in_place, capturable):
    def edited(numbers, after):
        params = parameters([(40,), (30,)])
        group = {"params": params, "param_numbers": numbers}
        optimizer = made([group], capturable=capturable)
        train(optimizer, 1)
        own = optimizer.param_groups[0]
        if in_place:
            own["param_numbers"][:] = after
        else:
            own["param_numbers"] = after
        train(optimizer, 2, 1)
        return snapshot(optimizer)

    def anew(numbers, after):
        """The second half by an optimizer that was made with these numbers."""
        params = parameters([(40,), (30,)])
        first = made([{"params": params, "param_numbers": numbers}])
        train(first, 1)
        second = made([{"params": params, "param_numbers": after, "step": 1}])
        train(second, 2, 1)
        return snapshot(second)

    found, expected = edited([5, 9], [9, 2]), anew([5, 9], [9, 2])
    assert_same(found["weights"], expected["weights"])
    kept = edited([5, 9], [5, 9])["weights"]
    assert any(bool((one != other).any()) for one, other in zip(kept, found["weights"]))  # noqa: B905


@pytest.mark.parametrize("wrong", [[1], [1, -1], "ab", 7, [3, 3]], ids=repr)
def test_numbers_that_were_edited_wrongly_are_refused_before_the_step(wrong):
    optimizer = made([{"params": parameters([(4,), (3,)]), "param_numbers": [1, 2]}])
    train(optimizer, 1)
    optimizer.param_groups[0]["param_numbers"] = wrong
    give_gradients(params_of(optimizer), 1)
    clash = "number 3, by which random bits are drawn, must be its own"
    allowed = r"group 0: param_numbers must be a list of 2 whole numbers from 0 to 2\*\*32 - 1, got"
    with refused(optimizer, clash if wrong == [3, 3] else allowed):
        optimizer.step()


@pytest.mark.parametrize("number", [-1, 2**32, 1.5, "3", True, None], ids=repr)
def test_the_number_of_a_parameter_is_a_whole_number_of_32_bits(number):
    params = parameters([(4,), (3,)])
    optimizer = made(params)
    params[1].megaopt_number = number
    give_gradients(params, 0)
    before = snapshot(optimizer)
    allowed = r"parameter 1 of group 0: megaopt_number must be a whole number from 0 to 2\*\*32 - 1"
    with pytest.raises(ValueError, match=allowed):
        optimizer.step()
    with pytest.raises(ValueError, match=allowed):
        made(params)
    assert_same(snapshot(optimizer), before)
    params[1].megaopt_number = 2**32 - 1
    optimizer.step()


# --- loads by name


ORDER = ("first", "second", "third")
NUMBERS = {"first": 4, "second": 8, "third": 6}


def model_of(order, named=False, **group):
    """A model whose parameters come in this order, and its optimizer."""
    model = torch.nn.Module()
    for name in order:
        own = values((30,), ORDER.index(name)).to(BF16)
        model.register_parameter(name, torch.nn.Parameter(own))
    params = list(model.named_parameters()) if named else list(model.parameters())
    return model, made([{"params": params, **group}], momentum=0.9)


def train_by_name(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        for name, param in model.named_parameters():
            param.grad = values((30,), 10 * step + ORDER.index(name)).to(BF16)
        optimizer.step()


def numbers_in(order):
    return [NUMBERS[name] for name in order]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_a_load_by_name_leaves_each_parameter_its_number(flat, named):
    """The second model has its parameters in another order."""
    other = ("third", "first", "second")
    given = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = model_of(ORDER, named, param_numbers=numbers_in(ORDER))
    train_by_name(model, optimizer, 2)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=given))
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    train_by_name(model, optimizer, 2, 2)
    resumed, found = model_of(other, named, param_numbers=numbers_in(other))
    train_by_name(resumed, found, 1)  # a state for torch to fill
    set_optimizer_state_dict(resumed, found, saved, options=given)
    resumed.load_state_dict(weights)
    assert found.param_groups[0]["param_numbers"] == numbers_in(other)
    train_by_name(resumed, found, 2, 2)
    assert_same(dict(resumed.named_parameters()), dict(model.named_parameters()))


def test_a_load_by_name_needs_numbers_to_keep():
    model, optimizer = model_of(ORDER, param_numbers=numbers_in(ORDER))
    train_by_name(model, optimizer, 1)
    saved = get_optimizer_state_dict(model, optimizer)
    other, found = model_of(ORDER)
    train_by_name(other, found, 1)
    message = (
        r"group 0: param_numbers must be given to this optimizer, as the state dict, which goes by "
        r"names, has them, got none"
    )
    with refused(found, message):
        set_optimizer_state_dict(other, found, saved)


def test_a_load_by_place_takes_the_numbers():
    params = parameters([(40,), (30,)])
    optimizer = made([{"params": params, "param_numbers": [5, 9]}])
    other = made([{"params": parameters([(40,), (30,)]), "param_numbers": [1, 2]}])
    train(optimizer, 1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_numbers"] == [5, 9]


# --- the seed


def test_a_seed_is_taken_over_from_the_state_dict_whether_anything_draws_or_not():
    """Through an optimizer that draws nothing it comes back to one that does."""
    drawn = made(parameters(), seed=7)
    plain = FusedSGD(parameters(), lr=2e-3, master_weights=False)
    again = made(parameters(), seed=99)
    train(drawn, 2)
    plain.load_state_dict(drawn.state_dict())
    train(plain, 1)
    again.load_state_dict(plain.state_dict())
    assert [group["seed"] for group in again.param_groups] == [7]
    other = made(parameters(), seed=7)
    train(other, 3)
    copy_weights(other, again)
    train(again, 2, 3)
    train(other, 2, 3)
    assert_same(snapshot(again)["weights"], snapshot(other)["weights"])


def test_without_a_seed_in_the_state_dict_the_optimizers_own_stays():
    plain, drawn = FusedSGD(parameters(), master_weights=False), made(parameters(), seed=99)
    train(plain, 1)
    drawn.load_state_dict(plain.state_dict())
    assert [group["seed"] for group in drawn.param_groups] == [99]

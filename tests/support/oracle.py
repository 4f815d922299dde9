"""An independent oracle of contract ieee: numpy, every operation in fp64 and rounded to fp32 once.

Rounding the fp64 result of one operation on fp32 numbers to fp32 gives the correctly rounded fp32
result: for +, -, *, / and the root, 53 bits are at least 2 * 24 + 2 (Figueroa 1995), and where the
fp32 result is subnormal it has fewer bits still, so that the same bound holds. Nothing of megaopt
is used here but the names of its formats; bf16, fp8 and fp16 come from ml_dtypes and numpy.
Stochastic rounding is done on fp64 numbers, in units of the last place; random bits are in
philox_oracle.py.
"""

from fractions import Fraction

import block_oracle
import ml_dtypes
import numpy as np
import philox_oracle

F32 = np.float32
FLOAT8 = {
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "scaled_float8_e4m3": ml_dtypes.float8_e4m3fn,
}
NAN = np.uint32(0x7FC00000).view(F32)


def operation(function):
    def rounded(*values):
        with np.errstate(all="ignore"):
            return function(*(np.asarray(v, np.float64) for v in values)).astype(F32)

    return rounded


add, subtract = operation(np.add), operation(np.subtract)
multiply, divide, root = operation(np.multiply), operation(np.divide), operation(np.sqrt)


def power(base, exponent):
    """base**exponent by squaring from the highest bit, each product rounded from the exact one."""
    result = Fraction(1)
    for bit in f"{exponent:b}":
        result = Fraction(float(result * result))
        if bit == "1":
            result = Fraction(float(result * Fraction(base)))
    return float(result)


def canonical(value):
    return np.where(np.isnan(value), NAN, value).astype(F32)


def adam_family(param, moments, grad, group, decoupled):
    """The numbered list of docs/numbers.md; AMSGrad has a third moment, the largest so far."""
    beta1, beta2 = group["betas"]
    correction1 = correction2 = 1.0
    if group["bias_correction"]:
        correction1 = 1.0 / (1.0 - power(beta1, group["step"]))
        correction2 = 1.0 / (1.0 - power(beta2, group["step"]))
    lr, eps, decay = (F32(group[name]) for name in ("lr", "eps", "weight_decay"))
    if not decoupled:
        grad = add(grad, multiply(decay, param))
    exp_avg = add(multiply(F32(beta1), moments[0]), multiply(F32(1.0 - beta1), grad))
    square = multiply(F32(1.0 - beta2), multiply(grad, grad))
    after = [exp_avg, add(multiply(F32(beta2), moments[1]), square)]
    if len(moments) == 3:
        with np.errstate(invalid="ignore"):
            after.append(np.maximum(moments[2], after[1]))
    denominator = add(root(multiply(after[-1], F32(correction2))), eps)
    update = divide(multiply(exp_avg, F32(correction1)), denominator)
    if decoupled:
        update = add(update, multiply(decay, param))
    return subtract(param, multiply(lr, update)), after


def adam(param, exp_avg, exp_avg_sq, grad, group, decoupled):
    param, moments = adam_family(param, (exp_avg, exp_avg_sq), grad, group, decoupled)
    return canonical(param), *map(canonical, moments)


def lion(param, moments, grad, group):
    """Chen et al. 2023, algorithm 2: the sign of one average moves the weight, another is kept."""
    beta1, beta2 = group["betas"]
    lr, decay = F32(group["lr"]), F32(group["weight_decay"])
    mixed = add(multiply(F32(beta1), moments[0]), multiply(F32(1.0 - beta1), grad))
    direction = np.where(np.isnan(mixed) | (mixed == 0), mixed, np.copysign(F32(1), mixed))
    update = add(direction, multiply(decay, param))
    exp_avg = add(multiply(F32(beta2), moments[0]), multiply(F32(1.0 - beta2), grad))
    return subtract(param, multiply(lr, update)), (exp_avg,)


def sgd(param, moments, grad, group, nesterov, decoupled):
    """torch.optim.SGD's documented algorithm; decoupled decay as in SGDW."""
    lr, decay = F32(group["lr"]), F32(group["weight_decay"])
    decayed = multiply(decay, param)
    update, after = grad if decoupled else add(grad, decayed), ()
    if moments and group["momentum"] == 0:
        after = moments
    elif moments:
        momentum = F32(group["momentum"])
        kept = F32(1.0 if group["step"] == 1 else 1.0 - group["dampening"])
        buffer = add(multiply(momentum, moments[0]), multiply(kept, update))
        update, after = add(update, multiply(momentum, buffer)) if nesterov else buffer, (buffer,)
    if decoupled:
        update = add(update, decayed)
    return subtract(param, multiply(lr, update)), after


def galore(param, moments, grad, group, kind):
    """The three rules of a step of low rank: AdamW, Adam's direction alone, and its use."""
    if kind == "adamw":
        return adam_family(param, moments, grad, group, True)
    if kind == "direction":
        own = {**group, "bias_correction": False}
        _, after = adam_family(param, moments, grad, own, True)
        return divide(after[0], add(root(after[1]), F32(group["eps"]))), after
    lr = float(F32(group["lr"]))
    rate = lr * group["scale"]
    if group["bias_correction"]:
        rate = rate * np.sqrt(1.0 - power(group["betas"][1], group["step"]))
        rate = rate / (1.0 - power(group["betas"][0], group["step"]))
    param = subtract(param, multiply(F32(rate), grad))
    return subtract(param, multiply(F32(lr * group["weight_decay"]), param)), ()


def muon(param, moments, grad, group, kind):
    """The momentum's direction, and what an update leaves of a weight."""
    if kind == "apply":
        lr = F32(group["lr"])
        kept = F32(1.0 - float(lr) * group["weight_decay"])
        return subtract(multiply(kept, param), multiply(lr, grad)), ()
    momentum = group["momentum"]
    mixed = momentum if group["nesterov"] else 1.0
    rest = multiply(F32(1.0 - momentum), grad)
    buffer = add(multiply(F32(momentum), moments[0]), rest)
    beside = multiply(F32(1.0 - mixed), grad)
    return add(multiply(F32(mixed), buffer), beside), (buffer,)


def update(rule, param, moments, grad, group):
    """The new param and moments by a rule's name."""
    name, _, kind = rule.partition("_")
    if name == "galore":
        param, moments = galore(param, moments, grad, group, kind)
    elif name == "muon":
        param, moments = muon(param, moments, grad, group, kind)
    elif name in ("adam", "adamw"):
        param, moments = adam_family(param, moments, grad, group, name == "adamw")
    elif name == "lion":
        param, moments = lion(param, moments, grad, group)
    else:
        param, moments = sgd(param, moments, grad, group, kind == "nesterov", name == "sgdw")
    return canonical(param), [canonical(moment) for moment in moments]


# Bits of mantissa, and the exponent of the smallest normal number.
FLOATS = {"bfloat16": (7, -126), "float16": (10, -14), "remainder8": (15, -126)}


def on_the_grid(value, name, bits=None):
    """A number of a format as fp64, beside an fp32 number: the nearest, or as 16 bits decide.

    In units of the last place, without a limit of the exponent above: what is too large is left to
    a cast. With bits the number goes up where its fraction, cut off after 16 bits, and they are
    together 1 or more.
    """
    mantissa, smallest = FLOATS[name]
    magnitude = np.abs(np.where(np.isfinite(value), value, F32(0))).astype(np.float64)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, smallest)
    exponent = np.where(magnitude == 0, smallest, exponent)
    unit = np.ldexp(1.0, exponent - mantissa)
    if bits is None:
        count = np.rint(magnitude / unit)
    else:
        count = np.floor(magnitude / unit)
        fraction = np.floor((magnitude / unit - count) * 2**16)
        count = count + (fraction + bits >= 2**16)
    return np.where(np.isfinite(value), np.copysign(count * unit, value), value)


def stochastic(name, value, bits):
    """The codes of bf16 or fp16."""
    with np.errstate(over="ignore"):
        near = on_the_grid(value, name, bits)
        if name == "float16":
            code = near.astype(np.float16).view(np.uint16)
            return np.where(np.isnan(value), np.uint16(0x7E00), code)
        code = near.astype(F32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), code)


def decode(name, code, scale):
    name = name.removesuffix("_stochastic")
    if name == "float32":
        return code.view(F32)
    if name == "bfloat16":
        return code.view(ml_dtypes.bfloat16).astype(F32)
    value = canonical(code.view(FLOAT8.get(name, np.float16)).astype(F32))
    return multiply(value, scale) if name.startswith("scaled") else value


def decode_moment(name, code, scale, first):
    """first: the tensor's first element in its parameter, from whose first blocks are counted."""
    if name.startswith("block"):
        return block_oracle.decode(name, code, scale, first % block_oracle.block_of(name))
    return decode(name, code, scale)


def encode(name, value, bits=None):
    """The codes as unsigned integers, and the scale or None; bits: 16 an element, if it draws."""
    if name.endswith("_stochastic"):
        return stochastic(name.removesuffix("_stochastic"), value, bits), None
    if name == "float32":
        return value.view(np.uint32), None
    if name == "bfloat16":
        code = value.astype(ml_dtypes.bfloat16).view(np.uint16)
        return np.where(np.isnan(value), np.uint16(0x7FC0), code), None
    scale = None
    if name == "scaled_float16":
        scale = scale_of(value, 32752)
        value = multiply(value, divide(F32(1), scale))
    if name == "scaled_float8_e4m3":
        inverse = divide(F32(1), scale_of(value, 448))
        scale = divide(F32(1), inverse)
        value = multiply(np.where(np.isfinite(value), value, NAN), inverse)
    if name in FLOAT8:
        return float8_codes(value, FLOAT8[name]), scale
    with np.errstate(over="ignore"):
        code = value.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7E00), code), scale


def scale_of(value, code_max):
    finite = np.abs(value[np.isfinite(value)])
    amax = finite.max() if finite.size else F32(0)
    return np.maximum(divide(amax, F32(code_max)), F32(2.0**-126))


def float8_codes(value, dtype):
    """The nearest codes: too large ones saturate, infinities too; a NaN is 0x7F."""
    largest = F32(ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        code = np.clip(value, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(value), np.uint8(0x7F), code)


def number_or_weight(pattern, weight_code):
    """The fp32 number of a pattern; where that is NaN, what the weight is by itself."""
    weight = (weight_code.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(F32)
    return np.where(np.isnan(pattern.view(F32)), weight, pattern.view(F32))


def join(weight_code, remainder):
    """The fp32 number whose upper half, rounded ties away, is the weight's code."""
    lower = remainder.view(np.uint16).astype(np.int64)
    upper = weight_code.view(np.uint16).astype(np.int64) - (lower >= 0x8000)
    return number_or_weight(((upper % 2**16) * 2**16 + lower).astype(np.uint32), weight_code)


def split(value):
    bits = value.view(np.uint32).astype(np.int64)
    lower = bits % 2**16
    upper = bits // 2**16 + (lower >= 0x8000)
    return (upper % 2**16).astype(np.uint16), lower.astype(np.uint16).view(np.int16)


def join24(weight_code, remainder):
    """The number of 24 bits whose upper 16, rounded ties away, are the weight's code."""
    lower = remainder.view(np.uint8).astype(np.int64)
    upper = weight_code.view(np.uint16).astype(np.int64) - (lower >= 0x80)
    pattern = ((upper % 2**16) * 2**16 + lower * 2**8).astype(np.uint32)
    return number_or_weight(pattern, weight_code)


def split24(value, bits=None):
    with np.errstate(over="ignore"):
        near = on_the_grid(canonical(value), "remainder8", bits).astype(F32)
    pattern = canonical(near).view(np.uint32).astype(np.int64) // 2**8
    lower = pattern % 2**8
    upper = pattern // 2**8 + (lower >= 0x80)
    return (upper % 2**16).astype(np.uint16), lower.astype(np.uint8)


def compensate(value, weight, bits=None, again=True):
    """The bf16 weight or fp16 weight (a format's name) of a value, and what it lost, as bf16."""
    code, _ = encode(weight, value)
    stored = decode(weight, code, None)
    whole = ~np.isfinite(stored) | (stored == value)
    lost = np.where(whole, np.copysign(F32(0), stored), subtract(value, stored)).astype(F32)
    rest = encode("bfloat16" if bits is None else "bfloat16_stochastic", lost, bits)[0]
    if again:
        # rounded to half of the weight's last place, it may be the neighbour's
        with np.errstate(all="ignore"):
            total = (stored + decode("bfloat16", rest, None)).astype(F32)
        other, its_rest = compensate(total, weight, again=False)
        moved = (other != code) & np.isfinite(decode(weight, other, None))
        code, rest = np.where(moved, other, code), np.where(moved, its_rest, rest)
    return code, rest


def joined_value(master, weight, codes):
    """The fp32 number that a weight and what lies beside it are together."""
    if master == "remainder16":
        return join(codes["weight"], codes["master"])
    if master.startswith("remainder8"):
        return join24(codes["weight"], codes["master"])
    compensation = decode("bfloat16", codes["master"], None)
    return canonical(add(decode(weight, codes["weight"], None), compensation))


def joined_codes(master, weight, value, bits):
    """The codes of a weight and of what lies beside it; bits: of a master that draws."""
    bits = bits if master.endswith("_stochastic") else None
    if master == "remainder16":
        return split(value)
    if master.startswith("remainder8"):
        return split24(value, bits)
    return compensate(value, weight, bits)


def step(names, codes, group, rule, moments, maximize, place, draws):
    """One step of one tensor.

    names: slot -> format name, without slots that hold nothing; codes: slot -> unsigned integers
    (grad, weight, master and the moments, whose names are given) and scales (fp32, or a byte a
    block); place: number, first element, run and stride of the tensor; draws: whether something
    does. Returns both after the step.
    """
    first = place[1]
    scale = {slot: codes.get(f"{slot}_scale") for slot in names}
    joined = names.get("master", "").startswith(("remainder", "kahan"))
    if joined:
        param = joined_value(names["master"], names["weight"], codes)
    else:
        source = "master" if "master" in names else "weight"
        param = decode(names[source], codes[source], scale[source])
    before = [decode_moment(names[name], codes[name], scale[name], first) for name in moments]
    grad = decode(names["grad"], codes["grad"], None)
    grad = np.negative(grad) if maximize else grad
    param, found = update(rule, param, before, grad, group)
    bits = {}
    if draws:
        words = philox_oracle.words(place, len(param), group["seed"], group["step"])
        bits = philox_oracle.bits_by_slot(words, moments)
    after = {}
    values = dict(zip(moments, found, strict=True))
    if joined:
        own = (names["master"], names["weight"], param, bits.get("weight"))
        after["weight"], after["master"] = joined_codes(*own)
    else:
        values["weight"] = param
        if "master" in names:
            values["master"] = param
    for slot, value in values.items():
        if names[slot].startswith("block"):
            lead = first % block_oracle.block_of(names[slot])
            after[slot], new_scale = block_oracle.encode(names[slot], value, lead, bits.get(slot))
        else:
            after[slot], new_scale = encode(names[slot], value, bits.get(slot))
        if new_scale is not None:
            after[f"{slot}_scale"] = new_scale
    return after

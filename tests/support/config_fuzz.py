"""Bad configs, drawn from good ones by a seed: what a command must refuse in words."""

import random

HUGE = (2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**64, 10**12, 10**400)
NUMBERS = (0, -1, 1, 2, 3, 7, 2**31 - 1, -(2**63), *HUGE)
VALUES = (
    *map(str, NUMBERS),
    *(str(-number) for number in HUGE),
    "0x" + "f" * 5000,
    *("nan", "-nan", "inf", "-inf", "0.0", "-0.0", "1e308", "1e39", "-1e308", "1e-320", "0.5"),
    *("true", "false", '""', "''", '"10"', '"nan"', '"x"', '"../x"', '"-x"', '"."', '"a b"'),
    *('"\\u0000"', '"\\ud800"', '"\\U0010FFFF"', '"' + "x" * 300 + '"', '"' + "é" * 5000 + '"'),
    *('"""\n"""', "[]", "[[]]", "[1, 2]", '["x", 1]', "{}", "{a = 1}", "[{}]", "[{}, 1]"),
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"),
    *('"cpu"', '"cuda"', '"auto"', '"unfused"', '"fused"', '"peer"', '"stock"', '"megaopt"'),
)
DEEP = (
    *("[" * depth + "]" * depth for depth in (50, 1500, 5000, 50_000)),
    *("{a=" * depth + "1" + "}" * depth for depth in (50, 1500, 5000, 50_000)),
)
HEADERS = ("[model]", "[optimizer]", "[megatron]", "[float8]", "[[variant]]", "[x]", "[[model]]")
BYTES = (b"\xff", b"\xc3\x28", b"\x00", b"\xed\xa0\x80", b"\r", b"\x1b[2J", b"\xef\xbb\xbf", b"=")


# a run of a moment, and what its keys may be without its becoming a long one
TINY = {
    "": {"seed": "1", "steps": "2", "batch_size": "2", "device": '"cpu"', "cpu_threads": "1"},
    "model": {"layers": "1", "heads": "2", "width": "16", "context": "8", "vocabulary_size": "256"},
    "optimizer": {"learning_rate": "3e-3", "weight_decay": "0.1"},
    "float8": {"recipes": "[]"},
    "[variant": {"name": '"unfused"', "kind": '"unfused"'},
    "[variant ": {"name": '"fused"', "kind": '"fused"', "baseline": '"unfused"'},
}
SIZES = ("1", "2", "3", "16", "17", "24", "0", "2147483647", "2147483648")
RATES = ("0.0", "1e-45", "1e-320", "0.9999999999999999", "1.0", "1e20", "3.4e38", "nan", "1e39")
EXTREMES = {
    "seed": ("0", "4294967296", "9223372036854775807", "9223372036854775808"),
    "steps": ("1", "3", "0"),
    "cpu_threads": ("1", "2", "1025"),
    "device": ('"auto"', '"cpu"', '"cuda"'),
    **dict.fromkeys(("batch_size", "layers", "heads", "width", "context"), SIZES),
    "vocabulary_size": ("255", "256", "257", "1000", "2147483647"),
    **dict.fromkeys(("learning_rate", "beta1", "beta2", "eps", "weight_decay"), RATES),
    "warmup_steps": ("0", "1", "2147483647", "2147483648"),
    "bias_correction": ("true", "false"),
    "adam_w_mode": ("true", "false"),
    "recipes": ('["delayed"]', '["current"]', '["block_128x128", "mxfp8"]'),
    "scaled_matmul": ("true", "false"),
    "name": ('"-x"', '"."', '".."', '"--help"', '"unfused"'),
    "contract": ('"ieee"', '"te"', '"torch"'),
    "backend": ('"auto"', '"triton"', '"reference"'),
    "masters": ('"created"', '"external"', '"remainders"'),
    "layout": ('"whole"', '"groups_and_views"'),
    "rounding": ('"nearest_even"', '"nearest_away"'),
    "resume_after": ("1", "2", "3"),
    "ranks": ("1", "64", "65"),
}
WHERE = {
    "": ("seed", "steps", "batch_size", "device", "cpu_threads"),
    "model": ("layers", "heads", "width", "context", "vocabulary_size"),
    "optimizer": (
        *("learning_rate", "beta1", "beta2", "eps", "weight_decay", "warmup_steps"),
        *("bias_correction", "adam_w_mode"),
    ),
    "float8": ("recipes", "scaled_matmul"),
    "[variant": ("name", "rounding"),
    "[variant ": ("name", "contract", "backend", "masters", "layout", "resume_after", "ranks"),
}


def extreme_run(seed):
    """The text of a tiny run with one to three keys at the ends of what they may be, or beyond."""
    rng = random.Random(seed)
    run = {table: dict(keys) for table, keys in TINY.items()}
    if rng.random() < 0.7:
        del run["float8"]
    else:
        run["float8"]["recipes"] = rng.choice(EXTREMES["recipes"])
    for _ in range(rng.choice((1, 2, 3))):
        table = rng.choice(list(run))
        key = rng.choice(WHERE[table])
        run[table][key] = rng.choice(EXTREMES[key])
    lines = []
    for table, keys in run.items():
        header = f"[{table.strip()}]" + "]" * table.startswith("[")
        lines += [header] * bool(table) + [f"{key} = {value}" for key, value in keys.items()]
    return "\n".join(lines)


def _key_lines(lines):
    return [number for number, line in enumerate(lines) if b" = " in line]


def another_value(lines, rng):
    """Another value for a key."""
    number = rng.choice(_key_lines(lines))
    key, _, _ = lines[number].partition(b" = ")
    lines[number] = key + b" = " + rng.choice(VALUES).encode()


def a_deep_value(lines, rng):
    """A value that is nested, for a key."""
    number = rng.choice(_key_lines(lines))
    key, _, _ = lines[number].partition(b" = ")
    lines[number] = key + b" = " + rng.choice(DEEP).encode()


def deep_keys(lines, rng):
    """A key, or a table, that leads through many tables."""
    path = ".".join(["a"] * rng.choice((30, 300, 2000)))
    line = rng.choice((f"{path} = 1", f"[{path}]", f"model.{path} = 1"))
    lines.insert(rng.randrange(len(lines) + 1), line.encode())


def left_out(lines, rng):
    """A line less."""
    del lines[rng.randrange(len(lines))]


def twice(lines, rng):
    """A line twice."""
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))


def an_unknown_key(lines, rng):
    """A key that nobody knows, or a known one in another place."""
    keys = ("x", "name", '""', "'a.b'", "kind", "steps", "recipe", "\u00e9", "a.b")
    line = f"{rng.choice(keys)} = {rng.choice(VALUES)}"
    lines.insert(rng.randrange(len(lines) + 1), line.encode())


def another_header(lines, rng):
    """A table's beginning, somewhere."""
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(HEADERS).encode())


def a_table_left_out(lines, rng):
    """A table less, with all that is in it."""
    begins = [n for n, line in enumerate(lines) if line.startswith(b"[")]
    begin = rng.choice(begins or [0])
    end = next((n for n in begins if n > begin), len(lines))
    del lines[begin:end]


def other_bytes(lines, rng):
    """Bytes that are no text, or no TOML, within a line."""
    number = rng.randrange(len(lines))
    place = rng.randrange(len(lines[number]) + 1)
    lines[number] = lines[number][:place] + rng.choice(BYTES) + lines[number][place:]


def cut_off(lines, rng):
    """The end less, perhaps all."""
    del lines[rng.randrange(len(lines)) :]
    if lines and rng.random() < 0.5:
        lines[-1] = lines[-1][: rng.randrange(len(lines[-1]) + 1)]


CHANGES = (
    *[another_value] * 8,
    *[left_out, twice, an_unknown_key] * 2,
    *(a_deep_value, deep_keys, another_header, a_table_left_out, other_bytes, cut_off),
)


def broken(text, rng):
    """A config's bytes with one to three changes."""
    lines = text.split(b"\n")
    for change in rng.choices(CHANGES, k=rng.choice((1, 1, 1, 2, 3))):
        if _key_lines(lines):
            change(lines, rng)
    return b"\n".join(lines)


def write_broken(folder, sources, seed):
    """A file, or in one of fifty cases a folder or nothing, in the place of a config; its path."""
    rng = random.Random(seed)
    path = folder / f"broken_{seed}.toml"
    kind = rng.random()
    if kind < 0.01:
        path.mkdir()
    elif kind > 0.02:
        path.write_bytes(broken(rng.choice(sources).read_bytes(), rng))
    return path

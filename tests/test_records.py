"""Records have the source that made them, and the tables of the pages say what the records say."""

import json
import re
import shutil
import statistics
import subprocess

import pytest
import torch
from record_pages import FOLDER, PAGE, REPOSITORY, assert_says, needs, read, rows_of, text_of, tool

import megaopt
from megaopt.float8 import Float8Weight

RECORDS = sorted(FOLDER.glob("*.json"))
COMMIT = re.compile("[0-9a-f]{40}")


# --- the source


def git(*arguments):
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def history():
    """Skips where commits cannot be looked up."""
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("needs a git checkout")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history, this is a shallow clone")


def commits_of(record):
    """The commit, or the two between which the source lay."""
    source = record["source"]
    if source["commit"] is not None:
        return [source["commit"]]
    return [source["commit_after"], source["commit_before"]]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_record_has_its_commit(path):
    record = read(path.name)
    for commit in commits_of(record):
        assert COMMIT.fullmatch(commit)
    if record["source"]["commit"] is not None:
        assert record["source"]["dirty"] in (False, None)
        assert re.fullmatch("[0-9a-f]{64}", record["source"]["sha256"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_record_names_no_folder_of_the_machine_that_made_it(path):
    assert re.findall(r"""(?<![^\s"'=:])/\w[^\s"]*""", path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_the_commits_of_a_record_are_in_the_history(path, history):
    first, last = (commits_of(read(path.name)) * 2)[:2]
    assert git("merge-base", "--is-ancestor", first, last).returncode == 0
    assert git("merge-base", "--is-ancestor", last, "HEAD").returncode == 0


# --- the tables


def cases(name):
    return {case["case"]: case for case in read(name)["cases"]}


STEPS = [
    *("transformerengine-bf16", "te:bf16"),
    *("transformerengine-bf16-remainders", "te:bf16-remainders"),
    *("transformerengine-bf16-moments", "te:bf16-moments"),
    *("transformerengine-fp16-moments", "te:fp16-moments"),
    *("transformerengine-fp8-moments", "te:fp8-moments"),
    *("torch-fused-fp32", "torch:fp32"),
    *("flashoptim-32bit-master", "bf16-remainders-moments"),
]


def test_the_steps_beside_other_libraries_are_the_records():
    found, rows = cases("h200-bench.json"), rows_of(PAGE, "| step of | set B |")
    assert len(rows) == len(STEPS)
    for row, name in zip(rows, STEPS, strict=True):
        case, on_c = found[f"B/{name}"], found[f"C/{name}"]
        ratios = {ratio["peer"]: ratio["step"] for ratio in case.get("times_faster_than", [])}
        peers = [ratio for peer, ratio in ratios.items() if peer in STEPS]
        own = peers if "x" in row[1] else []
        assert_says(row[1:4], case["step_ms"], *own, case["percent_of_copy"], on_c["wall_ms"])
        same = case.get("equal") and case["checked_against"] in STEPS
        assert row[4] == ("yes" if same else "no" if "ours" in case else "")


def test_the_recipes_beside_other_libraries_are_the_records():
    found = cases("h200-bench-fp8-B.json")
    rows = rows_of(PAGE, "| recipe | TransformerEngine |")
    recipes = ["delayed", "current", "block_128x128", "block_1x128", "mxfp8"]
    for row, recipe in zip(rows, recipes, strict=True):
        te = f"B/te:fp8-{recipe}"
        case, peer = found.get(te), found.get(f"B/transformerengine-fp8-{recipe}")
        if peer is None:
            case = found[f"B/fp8-{recipe}"]
            assert_says(row[2:5], case["step_ms"], case["percent_of_copy"])
            continue
        ratio = case["times_faster_than"][0]
        assert ratio["peer"] == f"transformerengine-fp8-{recipe}"
        times = (peer["step_ms"], case["step_ms"], ratio["step"])
        assert_says(row[1:5], *times, case["percent_of_copy"])
        assert row[5] == "yes"
        assert case["equal"] is True


PLAIN, BILLION = "h200x2-megatron_gpt_2gpu.json", "h200x2-megatron_gpt_1b_2gpu.json"
FOUR = "h200x4-megatron_gpt_4gpu.json"
OURS = ("stock_torch", "main_shards", "precision_aware")
# the record, stock's variant, the others in the order of the table
MEGATRON = [
    (BILLION, "stock_te", OURS),
    (BILLION, "stock_te_bf16_gradients", ("main_shards_bf16_gradients",)),
    (BILLION, "stock_te_remainders", ("remainders",)),
    (PLAIN, "stock_te", OURS),
    (FOUR, "stock_te", OURS),
]
FLOAT8 = [
    (f"h200x2-megatron_gpt_{name}.json", "stock_te", ("main_shards",))
    for name in (
        *("fp8_2gpu_without_cast", "fp8_2gpu"),
        *("fp8_tensorwise_2gpu", "fp8_blockwise_2gpu"),
    )
]


def megatron_rows(plan):
    """Each variant with its stock one, as they follow each other."""
    for name, stock, others in plan:
        variants = read(name)["variants"]
        for each in (stock, *others):
            yield variants[each], variants[stock], each


def times_of(row, variant, stock):
    """Step and iteration, and what they are beside stock's where the row says it."""
    own, theirs = variant["measured"], stock["measured"]
    step, iteration = own["optimizer_milliseconds"], own["step_milliseconds"]
    faster = [theirs["optimizer_milliseconds"] / step] if "x" in row[2] else []
    beside = [iteration / theirs["step_milliseconds"]] if "," in row[3] else []
    return [step, *faster, iteration, *beside]


def memory_of(variant, *keys):
    measured, units = variant["measured"], {"peak_bytes": 2**30}
    return [measured[key] / units.get(key, 2**20) for key in keys]


@pytest.mark.parametrize(
    ("heading", "plan", "keys"),
    [
        ("| GPUs, parameters a rank |", MEGATRON, ("state", "optimizer_extra", "peak")),
        ("| scaling | step |", FLOAT8, ("optimizer_extra",)),
    ],
    ids=["bf16", "fp8"],
)
def test_the_tables_of_megatron_are_the_records(heading, plan, keys):
    rows = rows_of("docs/benchmarks/README.md", heading)
    for row, (variant, stock, name) in zip(rows, megatron_rows(plan), strict=True):
        counted = sum(variant["measured"]["bytes_per_parameter"].values())
        memory = memory_of(variant, *(f"{key}_bytes" for key in keys))
        assert_says(row[2:-1], *times_of(row, variant, stock), counted, *memory)
        assert ("x" in row[2], "," in row[3]) == ("stock" not in name, variant is not stock)
        same = variant["baseline"] is not None and variant["identical"]
        others = "others" if name == "stock_torch" else ""
        assert row[-1] == ("TransformerEngine's" if same else others)


def test_megatrons_steps_are_the_records():
    variants = read(BILLION)["variants"]
    rows = rows_of(PAGE, "| Megatron's step |")
    named = [
        ("stock_te", "main_shards"),
        ("stock_te", "precision_aware"),
        ("stock_te_bf16_gradients", "main_shards_bf16_gradients"),
        ("stock_te_remainders", "remainders"),
    ]
    for row, (stock, name) in zip(rows, named, strict=True):
        theirs, own = (variants[each]["measured"] for each in (stock, name))
        times = [each["optimizer_milliseconds"] for each in (theirs, own)]
        shown = times if row[1] else times[1:]
        assert_says(row[1:5], *shown, times[0] / times[1], own["peak_bytes"] / 2**30)
        assert row[5] == "yes"
        assert variants[name]["identical"] is True


def test_the_table_of_the_hosts_share_is_the_record():
    found = read("h200-bench-host.json")["host"]["cases"]
    rows = rows_of("docs/benchmarks/README.md", "| tensors | ours | torch |")
    for row, case in zip(rows, found, strict=True):
        times = [case[name] for name in ("ours_ms", "torch_ms", "ours_moved_ms", "torch_moved_ms")]
        own, peer, moved, peer_moved = times
        assert_says(
            row, case["tensors"], own, peer, peer / own, moved, peer_moved, peer_moved / moved
        )


def test_the_table_of_what_is_rounded_stochastically_is_the_record():
    found = cases("h200-bench-rounded.json")
    for row in rows_of("docs/benchmarks/README.md", "| case | what | bytes a parameter |"):
        case = found[row[0]]
        keys = ("bytes_per_parameter", "step_ms", "percent_of_copy")
        assert_says(row[2:], *(case[key] for key in keys))
        assert case.get("equal", "ours" not in case) is True


def test_the_tables_of_fp8_weights_without_masters_are_the_records():
    found = cases("h200-bench-fp8-alone.json")
    rows = rows_of("docs/benchmarks/README.md", "| case | bytes a parameter | held |")
    assert [row[0] for row in rows] == [*found]
    for row in rows:
        case, base = found[row[0]], found.get("-".join(row[0].split("-")[:2]))
        held = case["held_bytes"] / case["elements"]
        numbers = [case["bytes_per_parameter"], held, case["step_ms"], case["percent_of_copy"]]
        if row[5]:
            numbers.append(base["step_ms"] / case["step_ms"])
        assert_says([each for each in row[1:] if each], *numbers)
        assert case["equal"] is True
    seeds = read("h200-fp8-gpt.json")["seeds"]
    rows = rows_of("docs/benchmarks/README.md", "| weights, masters, moments | seed 0 |")
    assert [row[0] for row in rows] == [*seeds["0"]]
    for row in rows:
        losses = [own[row[0]]["held_out"] for own in seeds.values() if row[0] in own]
        assert_says([each for each in row[1:] if each], *losses)


def test_the_table_of_masters_is_the_record():
    seeds = read("h200-masters.json")["seeds"]
    rows = rows_of("docs/benchmarks/README.md", "| master and moments |")
    assert [row[0] for row in rows] == [*seeds["0"]]
    for row in rows:
        assert_says(row[1:], *(own[row[0]]["held_out"] for own in seeds.values()))


def test_the_table_of_steps_before_and_after_is_the_records():
    before, after = (cases(f"h200-bench-step-{when}.json") for when in ("before", "after"))
    rows = rows_of("docs/benchmarks/README.md", "| case | before: device |")
    assert [row[0] for row in rows] == list(after)
    for row in rows:
        pair = (before[row[0]], after[row[0]])
        assert_says(row[1:], *(each[key] for each in pair for key in ("step_ms", "wall_ms")))


def test_the_count_of_the_gpu_suite_is_the_records():
    found = read("h200-gpu-suite.json")["outcomes"]
    text = f"{found['passed']:,} passed, {found['skipped']} skipped"
    for page in ("docs/benchmarks/README.md", "docs/reliability.md"):
        assert text in (REPOSITORY / page).read_text(encoding="utf-8")
    assert found.keys() == {"passed", "skipped"}


# --- moments in blocks

MOMENTS_IN_BLOCKS = ("h200-bench-blocks-B.json",)


@needs(*MOMENTS_IN_BLOCKS)
def test_the_table_of_moments_in_blocks_is_the_records():
    found = {name: case for each in MOMENTS_IN_BLOCKS for name, case in cases(each).items()}
    rows = rows_of(PAGE, "| case | what | moved | held |")
    assert [row[0] for row in rows] == list(found)
    for row, case in zip(rows, found.values(), strict=True):
        held = case["held_bytes"] / case["elements"]
        moved = case["bytes_per_parameter"]
        assert row[1] == case["description"]
        assert_says(row[2:], moved, held, case["step_ms"], case["percent_of_copy"])
        assert case.get("equal", "ours" not in case) in (True, None)


def test_the_table_of_one_tensor_is_the_record():
    found = cases("h200-bench-blocks.json")
    rows = rows_of(PAGE, "| on one tensor | what |")
    for row in rows:
        case = found[row[0]]
        assert row[1] == case["description"]
        assert_says(row[2:], case["step_ms"], case["percent_of_copy"])
    measured = {name for name, case in found.items() if "step_ms" in case}
    assert {name for name in measured if name.startswith("A/")} <= {row[0] for row in rows}


@pytest.mark.parametrize("name", ["h200-moments-gpt.json", "h200-moments-gpt-seeds.json"])
def test_the_tables_of_a_gpt_with_moments_in_blocks_are_the_records(name, monkeypatch):
    table = tool("trained_gpt", monkeypatch).table(read(name))
    assert table in (REPOSITORY / PAGE).read_text(encoding="utf-8")


def test_what_8_bits_cost_beside_fp32_masters_is_the_records():
    """In nine seeds: the mean of what they end higher by, and fp32's own standard deviation."""
    pairs = [
        (runs["fp32"]["held_out"], runs["fp32, 8-bit moments"]["held_out"])
        for name in ("h200-moments-gpt.json", "h200-moments-gpt-seeds.json")
        for runs in read(name)["seeds"].values()
    ]
    exact, eight = zip(*pairs, strict=True)
    higher = [b - a for a, b in pairs]
    text = (
        f"in each of nine seeds, by {statistics.mean(higher):.3f} in the mean, where fp32's own "
        f"losses have a standard deviation of {statistics.stdev(exact):.3f}"
    )
    assert len(pairs) == 9
    assert min(higher) > 0
    assert text in text_of(PAGE)
    assert sum(value > max(exact) for value in eight) == 5  # as the page says


def test_the_table_of_moments_beside_exact_ones_is_the_record(monkeypatch):
    table = tool("moment_fidelity", monkeypatch).table(read("h200-moments.json"))
    assert table in (REPOSITORY / PAGE).read_text(encoding="utf-8")


def moments_of(stated):
    """The options of moments that take so many bytes."""
    names = {
        "8": ("float32", "float32"),
        "4": ("bfloat16_stochastic", "bfloat16_stochastic"),
        "2.02": ("block_e4m3", "block_e5m3"),
        "1.06": ("block32_e3m0", "block32_e4m0"),
    }
    return dict(zip(("exp_avg_dtype", "exp_avg_sq_dtype"), names[stated], strict=True))


def masters_of(what):
    name = next(
        (value for key, value in MASTERS.items() if what.lower().startswith(key)), torch.float32
    )
    return {"master_weights": name is not None, "master_weight_dtype": name or torch.float32}


def weight_of(what):
    value = torch.ones(64, 512, dtype=torch.bfloat16)
    is_fp8 = what.startswith("fp8 weights")
    return torch.nn.Parameter(Float8Weight.from_values(value, "delayed") if is_fp8 else value)


MASTERS = {
    "8 more bits": "remainder8_stochastic",
    "stochastic, moments": None,
    "exact": "remainder16",
    "kahan": "kahan_stochastic",
    "24-bit": "remainder8_stochastic",
    "no master": None,
}


def test_the_bytes_held_of_the_page_are_those_of_the_tensors():
    rows = rows_of("docs/how-to/low_memory.md", "| bytes held a parameter, beside gradients |")
    assert len(rows) == 13
    for row in rows:
        param = weight_of(row[0])
        param.grad = torch.ones(64, 512, dtype=torch.bfloat16)
        own = row[0].removeprefix("fp8 weights, ")
        options = {**masters_of(own), **moments_of(row[3])}
        if own.startswith("stochastic"):
            options |= {"weight_rounding": "stochastic"}
        optimizer = megaopt.FusedAdam([param], backend="reference", **options)
        optimizer.step()
        codes = param.data8 if own != row[0] else param
        held = {"weight": codes.nbytes, "master": 0, "moments": 0}
        for name, value in optimizer.state[param].items():
            if value is not None:
                held["master" if name == "master_param" else "moments"] += value.nbytes
        each = [found / param.numel() for found in held.values()]
        assert_says(row[1:5], *each, sum(each))


# --- the first page

CHOICES = [
    ("h200-bench.json", "te:bf16", "transformerengine-bf16", 14),
    ("h200-bench.json", "te:bf16-remainders", "transformerengine-bf16-remainders", 12),
    (*MOMENTS_IN_BLOCKS, "bf16-remainders-blocks", "flashoptim-8bit-32bit-master", None),
    (*MOMENTS_IN_BLOCKS, "remainder8_stochastic-blocks", "flashoptim-8bit", None),
    (*MOMENTS_IN_BLOCKS, "blocks", "bitsandbytes-8bit", None),
    (*MOMENTS_IN_BLOCKS, "blocks-4bit", "torchao-4bit", None),
]
"""Record, our case, the usual choice's, and the bytes held where the record is older than those."""


def test_the_formats_of_the_first_page_are_the_records():
    rows = rows_of("README.md", "| take | held | moved | ms |")
    *measured, host, galore = rows
    for row, (record, own, usual, held) in zip(measured, CHOICES, strict=True):
        case, other = (cases(record)[f"B/{name}"] for name in (own, usual))
        held = held or case["held_bytes"] / case["elements"]
        assert_says(row[1:5], held, case["bytes_per_parameter"], case["step_ms"], other["step_ms"])
        assert usual.startswith(row[4].split()[0].lower())
    assert (host[1], host[2]) == ("2 on the GPU", measured[0][2])  # of the bf16 weight
    state = json.loads((REPOSITORY / "docs/benchmarks/h200-galore-whole.json").read_text())["state"]
    assert_says(galore[1:2], 2 + state["bytes"] / (state["weights"] / 2))


def test_what_the_first_page_says_of_speed_is_the_record():
    found = cases("h200-bench.json")
    formats = ("bf16", "bf16-remainders", "bf16-moments")
    own = [found[f"B/te:{name}"] for name in formats]
    times = [case["times_faster_than"][0]["step"] for case in own]
    of_copy = [case["percent_of_copy"] for case in own]
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f"takes {min(times):.1f} to {max(times):.1f} times less time than" in text
    assert f"at {min(of_copy):.0f} to {max(of_copy):.0f}% of the\n  speed of copying" in text
    page = (REPOSITORY / PAGE).read_text(encoding="utf-8")
    steps = [case["step_ms"] for case in own]
    assert f"takes {min(steps):.1f} to {max(steps):.1f} ms" in page
    assert f"{min(times):.2f} to {max(times):.2f} times less than TransformerEngine" in page


def test_the_picture_of_the_first_page_is_of_the_records(monkeypatch):
    drawn = tool("draw_first_page", monkeypatch)
    assert drawn.PICTURE.is_file()
    bars = drawn.bars()
    assert len(bars) == sum(map(len, drawn.GROUPS.values()))
    assert all(copy < time for _, _, time, copy in bars)
    for heading, label, *_ in bars:
        assert ("the same bits" in label) == (label == drawn.SAME), heading
    for rows in drawn.GROUPS.values():
        for label, record, name in rows:
            assert cases(record)[f"B/{name}"].get("equal", label != drawn.SAME) is True

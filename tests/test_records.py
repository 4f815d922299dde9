"""Records have the source that made them, and the tables of the pages say what the records say."""

import json
import re
import shutil
import subprocess

import pytest
import torch
from record_pages import FOLDER, PAGE, REPOSITORY, assert_says, read, rows_of, tables_of, tool

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
def test_a_record_has_its_commit_and_no_folder_of_the_machine_that_made_it(path):
    record = read(path.name)
    assert re.findall(r"""(?<![^\s"'=:])/\w[^\s"]*""", path.read_text(encoding="utf-8")) == []
    for commit in commits_of(record):
        assert COMMIT.fullmatch(commit)
    if record["source"]["commit"] is not None:
        assert record["source"]["dirty"] in (False, None)
        assert re.fullmatch("[0-9a-f]{64}", record["source"]["sha256"])


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
    recipes = ["delayed", "current", "block_128x128", "mxfp8"]
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


def test_megatrons_muon_is_the_record():
    variants = read("h200x2-megatron_gpt_muon_2gpu.json")["variants"]
    rows = rows_of(PAGE, "| Muon's step |")
    for row, (stock, name) in zip(
        rows, [("stock", "whole"), ("stock_on_owners", "owners")], strict=True
    ):
        measured = [variants[key]["measured"] for key in (stock, name)]
        steps, iterations = (
            [figures[f"{part}_milliseconds"] for figures in measured]
            for part in ("optimizer", "step")
        )
        assert_says(row[1:6], *steps, steps[0] / steps[1], *iterations)
        assert row[6] == "the same bits"
    compared = [variant for variant in variants.values() if variant["baseline"]]
    assert [variant["identical"] for variant in compared] == [True] * 3


def held(case):
    return case["held_bytes"] / case["elements"]


def of_bench(*keys):
    return lambda case: [case[key] for key in keys]


SPEED = of_bench("step_ms", "percent_of_copy")
MOVED = of_bench("bytes_per_parameter", "step_ms", "percent_of_copy")
BLOCKS = "h200-bench-blocks-B.json"
# heading, record, the column of the first figure, the figures
CASES = [
    ("| case | what | bytes a parameter |", "h200-bench-rounded.json", 2, MOVED),
    (
        "| case | what | moved | held |",
        BLOCKS,
        2,
        lambda case: [case["bytes_per_parameter"], held(case), *SPEED(case)],
    ),
    ("| on one tensor | what |", "h200-bench-blocks.json", 2, SPEED),
]


@pytest.mark.parametrize(
    ("heading", "name", "column", "figures"), CASES, ids=[name for _, name, _, _ in CASES]
)
def test_the_tables_of_cases_are_the_records(heading, name, column, figures):
    found, rows = cases(name), rows_of(PAGE, heading)
    assert rows
    for row in rows:
        case = found[row[0]]
        assert_says(row[column:], *figures(case))
        assert case.get("equal", "ours" not in case) in (True, None)


def test_the_table_of_the_hosts_share_is_the_record():
    found = read("h200-bench-host.json")["host"]["cases"]
    for row, case in zip(rows_of(PAGE, "| tensors | ours | torch |"), found, strict=True):
        times = [case[name] for name in ("ours_ms", "torch_ms", "ours_moved_ms", "torch_moved_ms")]
        own, peer, moved, peer_moved = times
        assert_says(
            row, case["tensors"], own, peer, peer / own, moved, peer_moved, peer_moved / moved
        )


def test_the_table_of_fp8_weights_without_masters_is_the_record():
    found = cases("h200-bench-fp8-alone.json")
    rows = rows_of(PAGE, "| case | bytes a parameter | held |")
    assert len(rows) > 10
    for row in rows:
        case, base = found[row[0]], found.get("-".join(row[0].split("-")[:2]))
        numbers = [case["bytes_per_parameter"], held(case), *SPEED(case)]
        if row[5]:
            numbers.append(base["step_ms"] / case["step_ms"])
        assert_says([each for each in row[1:] if each], *numbers)
        assert case["equal"] is True


LOSSES = [
    ("| weights, masters, moments | seed 0 |", "h200-fp8-gpt.json"),
    ("| master and moments |", "h200-masters.json"),
    *(
        ("| optimizer | seed", f"h200-{name}.json")
        for name in (
            *("moments-gpt", "moments-gpt-seeds", "galore-gpt-30M", "galore-gpt-60M"),
            *("galore-gpt-30M-subspace", "galore-gpt-60M-subspace"),
        )
    ),
]


@pytest.mark.parametrize(("heading", "name"), LOSSES)
def test_the_tables_of_held_out_losses_are_the_records(heading, name):
    """A row a kind, a column a seed; several tables may begin alike: one has to be the record's."""
    seeds = read(name)["seeds"]
    kinds = list(seeds["0"] if "0" in seeds else next(iter(seeds.values())))
    losses = [[own[kind]["held_out"] for own in seeds.values() if kind in own] for kind in kinds]
    shown = [
        [[cell for cell in row if cell] for row in rows]
        for rows in tables_of(PAGE, heading)
        if [row[0] for row in rows] == kinds
    ]
    shown = [[row[1:] for row in rows] for rows in shown]
    expected = [[f"{loss:.4f}" for loss in own] for own in losses]
    assert expected in shown


def test_the_count_of_the_gpu_suite_is_the_records():
    found = read("h200-gpu-suite.json")["outcomes"]
    text = f"{found['passed']:,} passed, {found['skipped']} skipped"
    for page in ("docs/benchmarks/README.md", "docs/reliability.md"):
        assert text in (REPOSITORY / page).read_text(encoding="utf-8")
    assert found.keys() == {"passed", "skipped"}


def test_the_count_of_the_gpu_sample_is_the_records():
    found = read("h200-gpu-sample.json")["outcomes"]
    text = "{passed:,} passed, {skipped} skipped".format(**found)
    for page in ("docs/benchmarks/README.md", "docs/reliability.md"):
        assert text in (REPOSITORY / page).read_text(encoding="utf-8")
    assert found.keys() == {"passed", "skipped"}


def test_the_table_of_stages_is_the_records():
    before, after = (cases(f"h200-bench-stages-{name}.json") for name in ("before", "after"))
    rows = rows_of(PAGE, "| case | in one piece | in stages |")
    assert [row[0] for row in rows] == list(before)
    for row in rows:
        assert_says(row[1:], before[row[0]]["step_ms"], *SPEED(after[row[0]]))
        assert before[row[0]]["equal"] is after[row[0]]["equal"] is True


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


# --- whole iterations, states in host memory, GaLore

ITERATIONS = [
    *(f"h200x2-megatron_gpt_{name}_2gpu.json" for name in ("graph", "fp8_iterations", "pipeline")),
    *("h200-megatron_gpt_1gpu.json", "h200-megatron_gpt_fp8_1gpu.json"),
]
OTHERS = [f"h200x2-megatron_gpt_{name}_2gpu.json" for name in ("tensor", "1b_memory", "offload")]


@pytest.mark.parametrize("name", [*ITERATIONS, *OTHERS])
def test_every_run_has_its_baselines_bits(name):
    assert read(name)["identical"] is True


def test_the_table_of_iterations_is_the_records():
    named = [(found, each) for found in map(read, ITERATIONS) for each in found["times"]]
    for row, (record, name) in zip(rows_of(PAGE, "| weights, layout |"), named, strict=True):
        times = record["times"][name]
        for cells, part in ((row[3:5], "optimizer"), (row[5:7], "step")):
            own = times[f"{part}_milliseconds"]
            beside = [] if name == "stock_te" else [own["of_baseline"]]
            assert_says(cells, own["median"], own["least"], own["most"], *beside)
        assert_says(row[2:3], times["runs"])


def test_the_tables_of_states_in_host_memory_are_the_records():
    record = read("h200-host-state.json")
    rows = rows_of(PAGE, "| states in host memory |")
    for row, (name, case) in zip(rows, record["cases"].items(), strict=True):
        assert row[0] == name
        times = [1e3 * case[key] for key in ("step_s", "copy_s")]
        rates = [case[key] for key in ("step_over_copies", "gb_per_s_each_way", "first_step_s")]
        assert_says(row[1:], case["bytes_each_way"] / 1e9, *times, *rates)
    ours = record["beside"]["megaopt"]["iteration_s"]
    rows = rows_of(PAGE, "| 1.3e8 parameters in fp32,")
    for row, (name, found) in zip(rows, record["beside"].items(), strict=True):
        assert row[0] == name
        assert_says(row[1:], 1e3 * found["iteration_s"], found["iteration_s"] / ours)
    kinds = ["stock_te", "main_shards", "main_shards_offload", "precision_aware_offload"]
    kinds += ["remainders_8_bit", "remainders_8_bit_offload"]
    found = [read(name)["variants"] for name in OTHERS[1:]]
    named = [each[kind] for each in found for kind in kinds if kind in each]
    for row, variant in zip(rows_of(PAGE, "| parameters a rank | step |"), named, strict=True):
        own = variant["measured"]
        sizes = [own[key] / 2**30 for key in ("state_bytes", "peak_bytes")]
        times = [own[key] for key in ("optimizer_milliseconds", "step_milliseconds")]
        assert_says(row[2:6], *sizes, *times)


def test_times_of_llamas_matrices_are_the_records():
    record = read("h200-galore-llama.json")
    rows = rows_of(PAGE, "| Llama-7B's 224 matrices, products of |")
    for row, precision in zip(rows, ("bf16", "tf32"), strict=True):
        own = record[precision]
        mean, longest = (own["with_refreshes"][name] for name in ("mean_ms", "longest_ms"))
        longer = 100 * own["refreshes_of_step"]
        assert_says(row[1:], own["step"]["ms"], own["of_fused_adam"], mean, longer, longest)


def test_the_tables_of_galore_are_the_record():
    record = read("h200-galore-whole.json")
    llama, refresh = record["llama"], record["refresh"]
    state, small, full = (
        record["state"][name] / 1e9 for name in ("bytes", "without_masters", "fused_adams")
    )
    scratch = [record[key] for key in ("workspace", "scratch of a step with refreshes")]
    expected = [
        [llama[f"{kernel}_ms"] for kernel in ("grouped", "hybrid", "auto")],
        *([llama["floor_ms"]], [record["fused_adam"]["ms"]]),
        *([100 * refresh["amortised"]], [refresh["worst"]]),
        [record["first step, all bases cold"]["ms"]],
        *([state, small], [full, full - (state - small)]),
        *([100 * each["part_of_weights"]] for each in scratch),
    ]
    rows = rows_of(PAGE, f"| Llama-7B's {llama['matrices']} matrices |")
    for row, values in zip(rows, expected, strict=True):
        assert_says(row[1:], *values)
    single = [case for name, case in record.items() if " of 4096x" in name]
    for row, case in zip(rows_of(PAGE, "| matrices | rank | products |"), single, strict=True):
        times = [case[key] for key in ("floor_ms", "grouped_ms", "hybrid_ms")]
        assert_says(row[3:], *times, min(times[1:]) / times[0])
    names = ("floor", "galore_torch", "hybrid", "grouped", "torch", "compiled")
    for row in rows_of(PAGE, "| weights and products |"):
        case = record["galore_torch " + row[0].replace(",", "")]
        times = [case[f"{name}_ms"] for name in names]
        assert_says(row[1:], *times, case["galore_torch_ms"] / case["auto_ms"])


# --- which format, which card

LOSSES = ("fp32", "remainder16", "fp32, 8-bit moments", "24-bit, 8-bit moments")
LOSSES += ("none, 8-bit moments", "none, 4-bit moments")


def test_the_losses_of_small_moments_are_the_records():
    seeds = read("h200-moments-gpt.json")["seeds"].values()
    rows = rows_of("docs/how-to/formats.md", "| masters | moments | held-out loss |")
    for row, kind in zip(rows, LOSSES, strict=True):
        found = [own[kind]["held_out"] for own in seeds]
        assert_says(row[2:], min(found), max(found))


def test_what_fits_a_card_is_what_its_bytes_say():
    heading = "| bytes | 24 GB | 40 GB | 80 GB | 141 GB | 24 GB, gradients released |"
    rows = rows_of("docs/how-to/formats.md", heading)
    for bytes_held, *row in rows:
        held = float(bytes_held.partition(",")[0])
        assert_says(row, *(size / (held + 2) for size in (24, 40, 80, 141)), 24 / held)


def test_what_is_said_of_cards_is_the_records():
    h200, h100 = cases("h200-bench.json")["B/bf16"], read("h100-digest.json")
    rows = rows_of("docs/how-to/cards.md", "| card | a copy's bandwidth |")
    copies = (h200["copy_bandwidth"] / 1e12, h100["copy"]["TB_s"])
    times = (h200["step_ms"], h100["steps"]["none"]["ms"])
    for row, *values in zip(rows, copies, times, strict=True):
        assert_says(row[1:], *values)
    text = (REPOSITORY / "docs/how-to/cards.md").read_text(encoding="utf-8")
    share = 100 * 28 * h100["elements"] / (times[1] * 1e9 * copies[1])
    for time, of_copy in zip(times, (h200["percent_of_copy"], share), strict=True):
        assert f"in {time:.2f} ms, {of_copy:.0f}% of a copy's speed" in text


# --- the first page

CHOICES = [
    ("h200-bench.json", "te:bf16", "transformerengine-bf16", 14),
    ("h200-bench.json", "te:bf16-remainders", "transformerengine-bf16-remainders", 12),
    (BLOCKS, "bf16-remainders-blocks", "flashoptim-8bit-32bit-master", None),
    (BLOCKS, "remainder8_stochastic-blocks", "flashoptim-8bit", None),
    (BLOCKS, "blocks", "bitsandbytes-8bit", None),
    (BLOCKS, "blocks-4bit", "torchao-4bit", None),
]
"""Record, our case, the usual choice's, and the bytes held where the record is older than those."""


def test_the_formats_of_the_first_page_are_the_records():
    rows = rows_of("README.md", "| arguments | bytes held | bytes moved |")
    *measured, host, galore = rows
    for row, (record, own, usual, held) in zip(measured, CHOICES, strict=True):
        case, other = (cases(record)[f"B/{name}"] for name in (own, usual))
        held = held or case["held_bytes"] / case["elements"]
        assert_says(row[1:5], held, case["bytes_per_parameter"], case["step_ms"], other["step_ms"])
        assert usual.startswith(row[4].split()[0].lower())
    assert (host[1], host[2]) == ("2 on the GPU", measured[0][2])  # of the bf16 weight
    state = json.loads((REPOSITORY / "docs/benchmarks/h200-galore-whole.json").read_text())["state"]
    assert_says(galore[1:2], 2 + state["bytes"] / (state["weights"] / 2))


def first_page():
    """README.md, without its line breaks."""
    return " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())


def test_what_the_first_page_says_of_megatron_is_the_records():
    text, variants = first_page(), read(BILLION)["variants"]
    stock, own = (variants[name]["measured"] for name in ("stock_te", "main_shards"))
    steps = [each["optimizer_milliseconds"] for each in (own, stock)]
    assert f"took {steps[0]:.1f} ms in place of {steps[1]:.1f}, with the same masters" in text
    assert variants["main_shards"]["identical"] is True
    shares = [
        variant["measured"]["step_milliseconds"]
        / variants[variant["baseline"]]["measured"]["step_milliseconds"]
        for variant in variants.values()
        if variant["baseline"]
    ]
    assert f"took {min(shares):.2f} to {max(shares):.2f} of the time" in text
    found = read("h200x2-megatron_gpt_1b_memory_2gpu.json")["variants"]
    peaks = [found[n]["measured"]["peak_bytes"] / 2**30 for n in ("stock_te", "remainders_8_bit")]
    assert f"from {peaks[0]:.1f} GiB to {peaks[1]:.1f}" in text


def test_what_the_first_page_says_of_the_loss_of_4_bits_is_what_its_page_says():
    rows = rows_of("docs/how-to/formats.md", "| masters | moments | held-out")
    losses = {(masters, moments): loss for masters, moments, loss in rows}
    found = losses["none, stochastic", "4 bits"], losses["fp32", "fp32"]
    assert f"[{' beside '.join(found)}]" in first_page()


def test_what_the_first_page_says_of_speed_is_the_record():
    found = cases("h200-bench.json")
    formats = ("bf16", "bf16-remainders", "bf16-moments")
    own = [found[f"B/te:{name}"] for name in formats]
    times = [case["times_faster_than"][0]["step"] for case in own]
    of_copy = [case["percent_of_copy"] for case in own]
    text = first_page()
    assert f"is {min(times):.1f} to {max(times):.1f} times as fast as" in text
    assert f"at {min(of_copy):.0f} to {max(of_copy):.0f}% of the speed of copying" in text
    index = (REPOSITORY / "docs/index.md").read_text(encoding="utf-8")
    assert f"is {min(times):.1f} to {max(times):.1f} times as fast as" in index
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


def test_the_picture_of_muon_has_the_times_of_its_page(monkeypatch):
    drawn = tool("draw_muon", monkeypatch)
    assert drawn.PICTURE.is_file()
    found = drawn.cases()
    assert all(case["floor_ms"] < case["step_ms"] for case in found)
    rows = rows_of("docs/how-to/muon.md", "| | FusedMuon, fp16 | FusedMuon, bf16 | gram-newton")
    for name, row in zip(("4 layers of Llama-3-8B", "GPT of 124M"), rows, strict=False):
        times = sorted(case["step_ms"] for case in found if case["set"] == name)
        assert_says(sorted(row[1:], key=float), *times)


def test_times_of_muon_on_an_h200_are_the_records():
    rows = rows_of(PAGE, "| | FusedMuon, fp16 | FusedMuon, bf16 | torch.optim")
    found = {(c["set"], c["optimizer"]): c["step_ms"] for c in read("h200-muon.json")["cases"]}
    sets = ("4 layers of Llama-3-8B", "GPT of 124M", "64 experts of 1408 x 2048")
    for row, name in zip(rows, sets, strict=True):
        names = ("ours-fp16", "ours", "torch", "emerging")
        assert_says(row[1:], *(found[name, each] for each in names))


GALORE_RECORDS = ("bench", "high-ranks", "peers")


def test_times_of_galore_on_an_h200_are_the_records():
    rows = rows_of(
        PAGE, "| matrix, products, rank | floor | hybrid | grouped | fused | galore_torch |"
    )
    own = {name: read(f"h200-galore-{name}.json")["cases"] for name in GALORE_RECORDS}
    for name, floor, *times in rows:
        shape, precision, rank = name.split(", ")
        kind = "bench" if precision == "ieee" else "peers" if int(rank) <= 128 else "high-ranks"
        case = {"columns": int(shape[7:]), "precision": precision, "rank": int(rank)}
        case["moments"] = "float32"
        cases = own[kind] + [c for c in own["peers"] if c["kernel"] == "galore_torch"]
        alike = {c["kernel"]: c for c in cases if case.items() <= c.items()}
        moving = 1e3 * alike["fused"]["floor_bytes"] / alike["fused"]["copy_bandwidth"]
        assert_says([floor], moving if kind == "bench" else alike["fused"]["floor_ms"])
        timed = [
            alike[each] for each in ("hybrid", "grouped", "fused", "galore_torch") if each in alike
        ]
        # the run's seconds may be over
        assert_says(filter(None, times), *(c["step_ms"] for c in timed if "step_ms" in c))


def test_the_picture_of_two_runs_shows_what_its_page_says(monkeypatch, tmp_path):
    drawn = tool("draw_diff", monkeypatch)
    assert drawn.PICTURE.is_file()
    found = drawn.compared(tmp_path)
    assert (found.blame.step, found.blame.kind) == (6, "optimizer")
    assert found.blame.tensors == (("embed.weight", "weight"),)
    differ = {each.quantity for each in found.growth if each.step == 7 and each.differ}
    equal = {each.quantity for each in found.growth if each.step == 7 and not each.differ}
    assert "weight" in differ
    assert equal == {"data", "random state"}
    assert "lr of group 0: 0.001, and 0.0009" in found.line
    drawn.draw(tmp_path / "drawn.png", found)
    assert (tmp_path / "drawn.png").stat().st_size > 10_000

"""Tables of whole iterations and of states in host memory, beside their records."""

import pytest
from record_pages import PAGE, assert_says, read, rows_of, text_of

ITERATIONS = [
    *(f"h200x2-megatron_gpt_{name}_2gpu.json" for name in ("graph", "fp8_iterations", "pipeline")),
    *("h200-megatron_gpt_1gpu.json", "h200-megatron_gpt_fp8_1gpu.json"),
]
WORDS = {"_graph": "captured", "_offload": "in host memory", "_resumed": "resumed"}
HOST = "h200-host-state.json"
TENSOR = "h200x2-megatron_gpt_tensor_2gpu.json"
MEMORY, OFFLOAD = (f"h200x2-megatron_gpt_{name}_2gpu.json" for name in ("1b_memory", "offload"))
# what a variant's row says of it, and whose bits it has
MEGATRONS_STATES = {
    "stock_te": ("stock, TransformerEngine", ""),
    "main_shards": ("main_shards", "TransformerEngine"),
    "main_shards_offload": ("main_shards, moments in host memory", "TransformerEngine"),
    "precision_aware_offload": ("precision_aware, all in host memory", "TransformerEngine"),
    "remainders_8_bit": ("8-bit moments and remainders", ""),
    "remainders_8_bit_offload": (
        "8-bit moments and remainders, all in host memory",
        "the same on the card",
    ),
}
BASELINES = {"": None, "TransformerEngine": "stock_te", "the same on the card": "remainders_8_bit"}


def spread_of(times):
    return times["median"], times["least"], times["most"]


def test_the_table_of_iterations_is_the_records():
    records = [read(name) for name in ITERATIONS]
    named = [(record, each) for record in records for each in record["times"]]
    rows = rows_of(PAGE, "| weights, layout |")
    for row, (record, name) in zip(rows, named, strict=True):
        times, variant = record["times"][name], record["variants"][name]
        step, whole = (times[f"{each}_milliseconds"] for each in ("optimizer", "step"))
        mode = "stock" if name == "stock_te" else name.split("_graph")[0].split("_offload")[0]
        assert row[1].startswith(mode)
        assert all((words in row[1]) == (part in name) for part, words in WORDS.items())
        ratios = [] if name == "stock_te" else [[each["of_baseline"]] for each in (step, whole)]
        for cells, each, ratio in zip(
            (row[3:5], row[5:7]), (step, whole), ratios or [[], []], strict=True
        ):
            assert_says(cells, *spread_of(each), *ratio)
        assert_says(row[2:3], times["runs"])
        assert variant["identical"] is (None if name == "stock_te" else True)


def test_what_is_said_of_the_captured_step_is_the_records():
    found = []
    for name in (ITERATIONS[0], ITERATIONS[3]):
        times = read(name)["times"]
        eager, captured = (times[f"main_shards{each}"] for each in ("", "_graph"))
        found.append(captured["step_milliseconds"]["median"] / eager["step_milliseconds"]["median"])
    text = f"takes {found[0]:.2f} of the eager one's on two GPUs, {found[1]:.2f} on one"
    assert text in text_of(PAGE)


def test_what_a_step_of_no_time_would_leave_is_the_records():
    left = []
    for name in ITERATIONS[3:]:
        stock = read(name)["times"]["stock_te"]
        step, whole = (stock[f"{each}_milliseconds"]["median"] for each in ("optimizer", "step"))
        left.append(1 - step / whole)
    text = f"would leave {left[0]:.2f} of stock's iteration in bf16, {left[1]:.2f} in fp8"
    assert text in text_of(PAGE)


@pytest.mark.parametrize("record", [*ITERATIONS, TENSOR, MEMORY, OFFLOAD])
def test_every_run_has_its_baselines_bits(record):
    assert read(record)["identical"] is True


def test_the_table_of_states_in_host_memory_is_the_record():
    cases = read(HOST)["cases"]
    rows = rows_of(PAGE, "| states in host memory |")
    for row, (name, case) in zip(rows, cases.items(), strict=True):
        assert row[0] == name
        milliseconds = [1e3 * case[key] for key in ("step_s", "copy_s")]
        rates = [case[key] for key in ("step_over_copies", "gb_per_s_each_way", "first_step_s")]
        assert_says(row[1:], case["bytes_each_way"] / 1e9, *milliseconds, *rates)
        assert case["same_bits_as_on_the_card"] is True


def test_iterations_beside_other_libraries_are_the_record():
    beside = read(HOST)["beside"]
    ours = beside["megaopt"]["iteration_s"]
    rows = rows_of(PAGE, "| 1.3e8 parameters in fp32,")
    for row, (name, found) in zip(rows, beside.items(), strict=True):
        assert row[0] == name
        assert_says(row[1:], 1e3 * found["iteration_s"], found["iteration_s"] / ours)


def test_the_table_of_megatrons_states_in_host_memory_is_the_records():
    records = [read(name)["variants"] for name in (MEMORY, OFFLOAD)]
    named = [(r[name], name) for r in records for name in MEGATRONS_STATES if name in r]
    assert len(named) == sum(map(len, records))
    rows = rows_of(PAGE, "| parameters a rank | step |")
    for row, (variant, name) in zip(rows, named, strict=True):
        own, (words, bits) = variant["measured"], MEGATRONS_STATES[name]
        sizes = [own[key] / 2**30 for key in ("state_bytes", "peak_bytes")]
        times = [own[key] for key in ("optimizer_milliseconds", "step_milliseconds")]
        assert (row[1], row[6]) == (words, bits)
        assert_says(row[2:6], *sizes, *times)
        assert variant["baseline"] == BASELINES[bits]
        assert variant["identical"] is (True if bits else None)


def test_what_the_how_to_says_of_megatrons_memory_is_the_record():
    variants = read(MEMORY)["variants"]
    names = ("stock_te", "precision_aware_offload", "remainders_8_bit")
    stock, host, small = (variants[name]["measured"] for name in names)
    freed = [(stock["peak_bytes"] - each["peak_bytes"]) / 2**30 for each in (host, small)]
    times = [each["optimizer_milliseconds"] for each in (host, stock, small)]
    text = text_of("docs/how-to/megatron.md")
    first = f"freed {freed[0]:.1f} GiB of the card, and a step took {times[0]:.0f} ms for stock's"
    assert f"{first} {times[1]:.0f}" in text
    assert f"freed {freed[1]:.1f} GiB, and a step took {times[2]:.1f} ms" in text

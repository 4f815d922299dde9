"""GaLore's tables and sentences on the pages say what its records say."""

import statistics

import pytest
from record_pages import FOLDER, PAGE, REPOSITORY, assert_says, needs, read, rows_of, text_of, tool

WHOLE = "h200-galore-whole.json"
GUIDE = "docs/how-to/galore.md"
SIZES = ("30M", "60M")
LOSSES = [f"h200-galore-gpt-{size}.json" for size in SIZES]
SUBSPACE = [f"h200-galore-gpt-{size}-subspace.json" for size in SIZES]
LIBRARIES = ("galore_torch fp32 tf32", "galore_torch bf16", "galore_torch fp32 ieee")


def gigabytes(name):
    return read(WHOLE)["state"][name] / 1e9


def masters():
    return gigabytes("bytes") - gigabytes("without_masters")


def test_the_table_of_all_matrices_is_the_record():
    record = read(WHOLE)
    llama, refresh = record["llama"], record["refresh"]
    scratch = record["scratch of a step with refreshes"]
    states = [gigabytes(name) for name in ("bytes", "without_masters", "fused_adams")]
    expected = [
        [llama[f"{kernel}_ms"] for kernel in ("grouped", "hybrid", "auto")],
        [llama["floor_ms"]],
        [record["fused_adam"]["ms"]],
        [100 * refresh["amortised"]],
        [refresh["worst"]],
        [record["first step, all bases cold"]["ms"]],
        states[:2],
        [states[2], states[2] - masters()],
        [100 * record["workspace"]["part_of_weights"]],
        [100 * scratch["part_of_weights"]],
    ]
    rows = rows_of(PAGE, f"| Llama-7B's {llama['matrices']} matrices |")
    for row, values in zip(rows, expected, strict=True):
        assert_says(row[1:], *values)
    assert f"a gap of {refresh['gap']}:" in rows[3][0]
    assert record["state"]["equal"] is True


def test_the_table_of_one_matrix_and_16_is_the_record():
    cases = {name: each for name, each in read(WHOLE).items() if " of 4096x" in name}
    rows = rows_of(PAGE, "| matrices | rank | products |")
    for row, (name, case) in zip(rows, cases.items(), strict=True):
        words = name.replace("x", " x ").split()
        assert row[0] == " ".join(words[:5])
        assert row[1:3] == [words[6], words[-1]]
        times = [case[key] for key in ("floor_ms", "grouped_ms", "hybrid_ms")]
        assert_says(row[3:], *times, min(times[1:]) / times[0])


def test_the_table_beside_galore_torch_is_the_record():
    rows = rows_of(PAGE, "| weights and products |")
    names = ("floor", "galore_torch", "hybrid", "grouped", "torch", "compiled")
    for row, library in zip(rows, LIBRARIES, strict=True):
        case = read(WHOLE)[library]
        assert row[0].replace(",", "") == library.removeprefix("galore_torch ")
        times = [case[f"{name}_ms"] for name in names]
        assert_says(row[1:], *times, case["galore_torch_ms"] / case["auto_ms"])


def said_of_speed():
    """How the page begins, and the parts of it that the guide has too."""
    record = read(WHOLE)
    ours = record["llama"]
    share = min(ours["grouped_ms"], ours["hybrid_ms"], ours["auto_ms"]) / record["fused_adam"]["ms"]
    faster = [record[name]["galore_torch_ms"] / record[name]["auto_ms"] for name in LIBRARIES]
    single = [case["of_floor"] for name, case in record.items() if name.startswith("1 of")]
    return (
        f"in {share:.2f} of FusedAdam's time",
        f"holds {gigabytes('bytes'):.1f} GB where FusedAdam holds {gigabytes('fused_adams'):.1f}",
        f"{min(faster):.2f} to {max(faster):.2f} times less time than with galore_torch",
        f"take {min(single):.1f} to {max(single):.1f} times less",
    )


def test_what_the_page_and_the_guide_say_of_speed_is_the_record():
    for sentence in said_of_speed():
        assert sentence in text_of(PAGE)
    for sentence in said_of_speed()[:3]:
        assert sentence in text_of(GUIDE)
    small = f"{gigabytes('without_masters'):.1f} GB"
    large = f"{gigabytes('fused_adams') - masters():.1f}"
    assert f"moments and projections {small}, where FusedAdam's moments take {large}" in text_of(
        GUIDE
    )


@pytest.mark.parametrize("name", LOSSES)
def test_the_tables_of_losses_are_the_records(name, monkeypatch):
    record = read(name)
    assert all([*runs] == ["galore_torch", "ours, SVD"] for runs in record["seeds"].values())
    table = tool("trained_gpt", monkeypatch).table(record)
    assert f"\n{table}\n" in (REPOSITORY / PAGE).read_text(encoding="utf-8")
    assert (FOLDER / name).with_suffix(".png").is_file()


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in SUBSPACE])
def test_the_tables_of_losses_by_subspace_iteration_are_the_records(name, monkeypatch):
    trained = tool("train_galore", monkeypatch)
    record, page = read(name), (REPOSITORY / PAGE).read_text(encoding="utf-8")
    assert f"\n{trained.trained_gpt.table(record)}\n" in page
    assert trained.energies(record) in text_of(PAGE)


def kinds_of(name):
    """The held-out losses of galore_torch and of ours."""
    seeds = read(name)["seeds"].values()
    return [[runs[kind]["held_out"] for runs in seeds] for kind in ("galore_torch", "ours, SVD")]


def test_what_is_said_of_losses_is_the_records():
    means = []
    for name in LOSSES:
        theirs, ours = kinds_of(name)
        means.append(statistics.mean(ours) - statistics.mean(theirs))
    apart = [max(each) - min(each) for name in LOSSES for each in kinds_of(name)]
    text = (
        f"ends {means[0]:.3f} higher in the mean with 30M, {-means[1]:.3f} lower with 60M, where "
        f"seeds of one kind lie {min(apart):.3f} to {max(apart):.3f} apart"
    )
    assert text in text_of(PAGE)
    ends = [statistics.mean(kind) for name in LOSSES for kind in kinds_of(name)]
    subspace = [
        statistics.mean(runs["ours"]["held_out"] for runs in read(name)["seeds"].values())
        for name in SUBSPACE
    ]
    text = (
        f"ours ends {ends[0] - subspace[0]:.3f} and {ends[2] - subspace[1]:.3f} lower than "
        "galore_torch"
    )
    assert text in text_of(PAGE)
    text = (
        f"a GPT of 30M parameters ends at {subspace[0]:.3f} nats a byte (galore_torch's at "
        f"{ends[0]:.3f}), one of 60M at {subspace[1]:.3f} ({ends[2]:.3f}); with refreshes by SVD "
        f"at {ends[1]:.3f} and {ends[3]:.3f}"
    )
    assert text in text_of(GUIDE)

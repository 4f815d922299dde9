import pytest
from tiny_runs import tiny_run, variant

from megaopt.lab.regression.megatron.config import read_megatron_run
from megaopt.lab.regression.megatron.traffic import bytes_per_parameter
from megaopt.lab.regression.plan import in_order, plan_trials
from megaopt.lab.toml_tables import ConfigError

STOCK = variant("stock", "stock", inner="unfused")


@pytest.fixture
def read(tmp_path):
    def read(variants=STOCK, run="", optimizer="", megatron="ranks = 2\nmicro_batch_size = 2"):
        path = tmp_path / "tiny.toml"
        tables = {"run": run, "optimizer": optimizer, "megatron": megatron}
        text = tiny_run(6, batch_size=8, **tables)
        path.write_text(text + variants, encoding="utf-8")
        return read_megatron_run(path)

    return read


def ours(name="ours", **keys):
    return variant(name, "megaopt", **keys)


FP32, BF16 = "grad_reduce_in_fp32 = true", "grad_reduce_in_fp32 = false"
ENGINE = STOCK.replace("unfused", "transformer_engine")
ENGINE_AWARE = ENGINE + 'mode = "precision_aware"\n'
REMAINDERS = "store_param_remainders = true\n"
AWARE = ours(mode="precision_aware", exp_avg_dtype="bfloat16", exp_avg_sq_dtype="float8")


TWO = "ranks = 2\nmicro_batch_size = 2\n"
MUON = TWO + 'optimizer = "muon"\n'
STOCK_MUON = STOCK + 'layout = "whole"\n'
GALORE = "\n[galore]\nrank = 4\n"
BESIDE = "with a table [galore]"

REFUSED = [
    (
        {"variants": STOCK_MUON},
        "layout must be 'shards' with optimizer = 'adam', got 'whole'",
    ),
    (
        {"variants": STOCK + ours(contract="eo")},
        "contract must be 'ieee' or 'te' or 'torch' with optimizer = 'adam', got 'eo'",
    ),
    (
        {"megatron": MUON},
        "layout must be 'whole' or 'owners', as Megatron's own Muon has no others, got 'shards'",
    ),
    (
        {"megatron": MUON, "variants": STOCK_MUON.replace("unfused", "torch")},
        "inner must be 'unfused' with optimizer = 'muon', got 'torch'",
    ),
    (
        {"megatron": MUON, "variants": ours(contract="te")},
        "contract must be 'ieee' or 'eo' with optimizer = 'muon', got 'te'",
    ),
    (
        {"megatron": MUON, "variants": ours(cpu_offload=True)},
        "cpu_offload must be false with optimizer = 'muon', got True",
    ),
    (
        {"megatron": MUON, "variants": ours(mode="precision_aware")},
        "mode must be 'main_shards' with optimizer = 'muon', got 'precision_aware'",
    ),
    (
        {"megatron": MUON, "variants": ours(cuda_graph=True)},
        "cuda_graph must be false with optimizer = 'muon', got True",
    ),
    (
        {"megatron": MUON + "tensor_parallel = 2", "variants": ours()},
        "layout must be 'whole' or 'owners' where tensor-parallel ranks bring matrices together, g",
    ),
    (
        {"megatron": MUON, "variants": STOCK_MUON + ours(baseline="stock")},
        "ours.baseline must be a variant with the same layout",
    ),
    (
        {"megatron": MUON + 'precision = "fp32"', "variants": ours()},
        "megatron.precision must be 'bf16' with optimizer = 'muon', got 'fp32'",
    ),
    (
        {"megatron": MUON + 'fp8_recipe = "delayed"', "variants": ours()},
        "megatron.fp8_recipe must be left out with optimizer = 'muon', got 'delayed'",
    ),
    ({"variants": GALORE + STOCK}, f"stock.kind must be 'megaopt' {BESIDE}, got 'stock'"),
    (
        {"variants": GALORE + ours(layout="owners")},
        f"ours.layout must be 'shards' or 'whole' {BESIDE}, got 'owners'",
    ),
    (
        {"variants": GALORE + ours(contract="te")},
        f"ours.contract must be 'ieee' {BESIDE}, got 'te'",
    ),
    (
        {"variants": GALORE + ours(round_scaled_grads=True)},
        f"ours.round_scaled_grads must be false {BESIDE}, got True",
    ),
    (
        {"variants": GALORE + ours(layout="whole", resume_after=2)},
        "ours.resume_after must be left out with layout = 'whole', whose projections Megatron's c",
    ),
    (
        {"variants": GALORE + ours("whole", layout="whole") + ours(baseline="whole")},
        "ours.baseline must be a variant with the same layout, or clip_grad = 0: the norm's sums",
    ),
    (
        {"megatron": MUON, "variants": GALORE + ours()},
        f"megatron.optimizer must be 'adam' {BESIDE}, got 'muon'",
    ),
    (
        {"megatron": TWO + "tensor_parallel = 2", "variants": GALORE + ours()},
        f"megatron.tensor_parallel must be 1 {BESIDE}, got 2",
    ),
    (
        {"optimizer": "adam_w_mode = false", "variants": GALORE + ours()},
        f"optimizer.adam_w_mode must be true {BESIDE}, got False",
    ),
    (
        {"megatron": TWO + "experts = 3\nexpert_parallel = 2"},
        "megatron.expert_parallel must be a divisor of ranks = 2 and of experts = 3, got 2",
    ),
    (
        {"megatron": "ranks = 0\nmicro_batch_size = 2"},
        "megatron.ranks: Input should be greater than or equal to 1, got 0",
    ),
    (
        {"megatron": "ranks = 3\nmicro_batch_size = 2\ntensor_parallel = 2"},
        "megatron.tensor_parallel must be a divisor of ranks = 3, got 2",
    ),
    (
        {"megatron": "ranks = 3\nmicro_batch_size = 2"},
        "batch_size must be a multiple of the micro batches of 3 ranks, got 8",
    ),
    (
        {"optimizer": "bias_correction = false"},
        "optimizer.bias_correction must be true, as Megatron has no other Adam, got False",
    ),
    (
        {"variants": STOCK + 'mode = "precision_aware"'},
        "mode must be 'main_shards' with inner = 'unfused', got 'precision_aware'",
    ),
    (
        {"variants": STOCK.replace("unfused", "torch") + "resume_after = 3"},
        "resume_after must be left out with inner = 'torch', whose checkpoints ",
    ),
    (
        {"variants": STOCK + ours(exp_avg_dtype="bfloat16")},
        "exp_avg_dtype must be 'float32' with mode = 'main_shards', got 'bfloat16'",
    ),
    (
        {"variants": STOCK + ours(baseline="ours")},
        "ours.baseline must be the name of another variant, without a baseline: stock, got 'ours'",
    ),
    (
        {"variants": STOCK + ours(resume_after=3, resume_ranks=3)},
        "ours.resume_ranks must be a number whose micro batches divide batch_size = 8, got 3",
    ),
    (
        {"variants": STOCK + ours(baseline="stock", overlap_grad_reduce=False)},
        "ours.baseline must be a variant with the same overlap_grad_reduce",
    ),
    (
        {"variants": STOCK + ours(baseline="stock", resume_after=3, resume_ranks=1)},
        "ours.baseline must be a variant whose number of ranks changes",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_what_is_not_allowed_is_named(read, keys, message):
    with pytest.raises(ConfigError) as raised:
        read(**keys)
    assert message in str(raised.value)
    assert "tiny.toml: " in str(raised.value)


def test_a_resumed_variant_continues_a_straight_one_of_equal_settings(read):
    run = read(
        STOCK
        + ours("resumed", baseline="stock", resume_after=2)
        + ours("straight", baseline="stock")
        + ours("other", baseline="stock", resume_after=3, mode="precision_aware")
    )
    trials = {trial.name: trial for trial in plan_trials(run)}
    assert list(trials) == ["stock", "resumed", "straight", "other"]
    straight = trials["straight"].jobs[0]
    assert (straight.first, straight.last, straight.save_after) == (1, 6, (2,))
    assert trials["resumed"].jobs[0] == straight
    rest = trials["resumed"].jobs[1]
    assert (rest.first, rest.last, rest.load) == (3, 6, "straight-after-2")
    begun, rest = trials["other"].jobs
    assert (begun.name, begun.last, begun.save_after) == ("other-begun", 3, (3,))
    assert (rest.first, rest.load) == (4, "other-begun-after-3")
    # nothing is saved that nobody loads
    assert trials["stock"].jobs[0].save_after == ()


def test_runs_are_compared_with_the_first(read):
    run = read(STOCK + ours(baseline="stock", runs=3))
    trials = plan_trials(run)
    names = [("stock", None), ("ours", "stock"), ("ours.2", "ours"), ("ours.3", "ours")]
    assert [(trial.name, trial.baseline) for trial in trials] == names


def test_runs_of_a_variant_are_between_those_of_others(read):
    run = read(STOCK + "runs = 2\n" + ours(baseline="stock", runs=2, resume_after=3))
    order = [job.name for job in in_order(plan_trials(run))]
    begun = ["ours-begun", "ours", "ours.2-begun", "ours.2"]
    assert order == ["stock", "stock.2", *begun]
    run = read(STOCK + "runs = 2\n" + ours(baseline="stock", runs=2))
    assert [job.name for job in in_order(plan_trials(run))] == [
        "stock",
        "ours",
        "stock.2",
        "ours.2",
    ]


@pytest.mark.parametrize(
    ("variant", "keys", "total"),
    [
        # the sums of what each pass reads and writes, as written out for Megatron's step
        (ENGINE, FP32, 46),
        (ENGINE, FP32 + "\nclip_grad = 0.0", 38),
        (ENGINE, BF16, 52),
        (ENGINE, FP32 + "\nfp8_recipe = 'blockwise'\nfp8_param_gather = true", 51),
        (ours(), FP32, 34),
        (ours(), BF16, 30),
        (ENGINE_AWARE + REMAINDERS, BF16, 32),
        (AWARE, BF16, 2 + 2 + 2 * (4 + 2 + 1) + 2),
    ],
)
def test_bytes_are_those_of_the_passes(read, variant, keys, total):
    run = read(variant, megatron=f"ranks = 2\nmicro_batch_size = 2\n{keys}")
    passes = bytes_per_parameter(run, run.variant[0], fused_clip=True)
    assert sum(passes.values()) == total

"""Models of transformers, sorted into FusedMuon's groups: what is a matrix, and where it is cut."""

import re
import warnings
from collections import Counter

import pytest
import torch
from one_rank import group_of_one
from torch import nn
from torch.distributed.fsdp import fully_shard

from megaopt import MUON_PRESETS, FusedMuon, muon_groups
from megaopt.kernels.muon.orthogonal import Orthogonal

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
MLA = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "llama": SMALL,
    "qwen3": {**SMALL, "head_dim": 24},
    "qwen3_moe": {**SMALL, "head_dim": 24, "num_experts": 4, "moe_intermediate_size": 24},
    "deepseek_v3": {**MLA, **EXPERTS, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {
        **MLA,
        **EXPERTS,
        "index_n_heads": 3,
        "index_head_dim": 10,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "gpt_oss": {
        **SMALL,
        "num_local_experts": 4,
        "head_dim": 24,
        "layer_types": ["full_attention"] * 2,
    },
    "kimi_linear": {
        **MLA,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "linear_num_heads": 3,
        "linear_head_dim": 10,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "phi3": {**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": {**SMALL, "bos_token_id": 1, "eos_token_id": 2},
}

PROJECTIONS = {"q_proj": [(64, 64)], "k_proj": [(32, 64)], "v_proj": [(32, 64)]}
HEADS = {"q_proj": 4 * [(16, 64)], "k_proj": 2 * [(16, 64)], "v_proj": 2 * [(16, 64)]}
WIDE = {"q_proj": [(96, 64)], "k_proj": [(48, 64)], "v_proj": [(48, 64)], "o_proj": [(64, 96)]}
WIDE_HEADS = {
    "q_proj": 4 * [(24, 64)],
    "k_proj": 2 * [(24, 64)],
    "v_proj": 2 * [(24, 64)],
    "o_proj": [(64, 96)],
}
MLP = {"gate_proj": [(96, 64)], "up_proj": [(96, 64)], "down_proj": [(64, 96)]}
EXPERTS_CUT = {"experts.gate_up_proj": 8 * [(24, 64)], "experts.down_proj": 4 * [(64, 24)]}
SHARED = {
    "shared_experts.gate_proj": [(24, 64)],
    "shared_experts.up_proj": [(24, 64)],
    "shared_experts.down_proj": [(64, 24)],
}
LATENT = {
    "q_a_proj": [(32, 64)],
    "q_b_proj": [(96, 32)],
    "kv_a_proj_with_mqa": [(20, 64), (8, 64)],
    "kv_b_proj": [(64, 20), (48, 20)],
    "self_attn.o_proj": [(64, 48)],
}
LATENT_HEADS = {
    **LATENT,
    "q_b_proj": 4 * [(24, 32)],
    "kv_b_proj": 4 * [(16, 20), (12, 20)],
}
KIMI = {
    **{f"0.self_attn.{name}_proj": [(30, 64)] for name in "qkv"},
    "f_a_proj": [(10, 64)],
    "f_b_proj": [(30, 10)],
    "g_a_proj": [(10, 64)],
    "g_b_proj": [(30, 10)],
    "0.self_attn.o_proj": [(64, 30)],
}
KIMI_HEADS = {
    **KIMI,
    **{f"0.self_attn.{name}_proj": 3 * [(10, 64)] for name in "qkv"},
    "f_b_proj": 3 * [(10, 10)],
    "g_b_proj": 3 * [(10, 10)],
}
NEOX = {"dense": [(64, 64)], "dense_h_to_4h": [(96, 64)], "dense_4h_to_h": [(64, 96)]}

MATRICES = {
    "llama": (
        {**PROJECTIONS, "o_proj": [(64, 64)], **MLP},
        {**HEADS, "o_proj": [(64, 64)], **MLP},
    ),
    "qwen3": ({**WIDE, **MLP}, {**WIDE_HEADS, **MLP}),
    "qwen3_moe": ({**WIDE, **EXPERTS_CUT}, {**WIDE_HEADS, **EXPERTS_CUT}),
    "deepseek_v3": (
        {**LATENT, **MLP, **EXPERTS_CUT, **SHARED},
        {**LATENT_HEADS, **MLP, **EXPERTS_CUT, **SHARED},
    ),
    "glm_moe_dsa": (
        {**LATENT, **MLP, **EXPERTS_CUT, **SHARED, "wq_b": [(30, 32)], "wk": [(10, 64)]},
        {**LATENT_HEADS, **MLP, **EXPERTS_CUT, **SHARED, "wq_b": 3 * [(10, 32)], "wk": [(10, 64)]},
    ),
    "gpt_oss": (
        {**WIDE, "experts.gate_up_proj": 4 * [(64, 192)], "experts.down_proj": 4 * [(96, 64)]},
        {
            **WIDE_HEADS,
            "experts.gate_up_proj": 4 * [(64, 192)],
            "experts.down_proj": 4 * [(96, 64)],
        },
    ),
    "kimi_linear": (
        {**KIMI, **LATENT, **MLP, **EXPERTS_CUT, **SHARED},
        {**KIMI_HEADS, **LATENT_HEADS, **MLP, **EXPERTS_CUT, **SHARED},
    ),
    "phi3": (
        {
            "qkv_proj": [(64, 64), (32, 64), (32, 64)],
            "o_proj": [(64, 64)],
            "gate_up_proj": 2 * [(96, 64)],
            "down_proj": [(64, 96)],
        },
        {
            "qkv_proj": 8 * [(16, 64)],
            "o_proj": [(64, 64)],
            "gate_up_proj": 2 * [(96, 64)],
            "down_proj": [(64, 96)],
        },
    ),
    "gpt_neox": (
        {"query_key_value": 3 * [(64, 64)], **NEOX},
        {"query_key_value": 12 * [(16, 64)], **NEOX},
    ),
}
"""The matrices of each model's layers, by the end of their names, whole and by heads."""


def build(kind, **settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS[kind], **settings})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def groups_of(model, **options):
    """The groups, and what a warning listed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = muon_groups(model, **options)
    texts = [re.search(r"Muon: (.*); exceptions", str(entry.message)).group(1) for entry in caught]
    return groups, [name for text in texts for name in text.split(", ")]


def matrices_in(model, groups):
    """The matrices of each parameter that Muon steps, by its name."""
    optimizer = FusedMuon(groups, lr=0.01)
    names = {f"parameter {name!r}": name for name, _ in model.named_parameters()}
    return {names[entry.name]: list(entry.matrices) for entry in optimizer.describe()}


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("kind", list(MATRICES))
def test_matrices_are_what_the_equations_multiply_by(kind, heads):
    model = build(kind)
    groups, unknown = groups_of(model, heads=heads)
    expected, used = MATRICES[kind][heads], Counter()
    for name, matrices in matrices_in(model, groups).items():
        plain = name.removesuffix(".weight")
        # the longest end that matches: "self_attn.o_proj" before "o_proj"
        ends = [end for end in expected if re.search(rf"(^|\.){re.escape(end)}$", plain)]
        if matrices:
            end = max(ends, key=len)
            assert Counter(matrices) == Counter(expected[end]), name
            used[end] += 1
        else:
            assert not ends, name
    assert set(used) == set(expected)
    assert len(unknown) == (2 if kind == "gpt_oss" else 0), unknown


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "phi3"])
def test_heads_have_the_bits_of_parameters_of_their_own(kind):
    """Each row of a fused or many-headed weight is stepped as in a parameter of its head alone."""
    model = build(kind)
    groups, _ = groups_of(model, heads=True, muon={"weight_decay": 0.1})
    optimizer = FusedMuon(groups, lr=0.05, adjust_lr_fn="match_rms_adamw")
    apart, pieces = [], {}
    for group in groups:
        if not group["use_muon"]:
            continue
        for name, param in group["params"]:
            rows = param.shape[-2]
            sizes = group["split_sizes"] or (rows,)
            if sum(sizes) < rows:  # sizes that come again: the rows of each are one matrix
                continue
            whole = param.detach().reshape(-1, param.shape[-1])
            counts = [*sizes] * (len(whole) // rows)
            pieces[name] = [nn.Parameter(part.clone()) for part in whole.split(counts)]
            apart += pieces[name]
    assert sum(len(parts) > 1 for parts in pieces.values()) > 2
    separate = FusedMuon(
        [{"params": apart, "use_muon": True}],
        lr=0.05,
        adjust_lr_fn="match_rms_adamw",
        weight_decay=0.1,
    )
    params = dict(model.named_parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name, param in params.items():
            param.grad = torch.randn(param.shape, generator=generator)
            if name in pieces:
                rows = param.grad.reshape(-1, param.shape[-1])
                parts = rows.split([len(part) for part in pieces[name]])
                for part, grad in zip(pieces[name], parts, strict=True):
                    part.grad = grad.clone()
        optimizer.step()
        separate.step()
    for name, parts in pieces.items():
        assert torch.equal(params[name].reshape(-1, parts[0].shape[-1]), torch.cat(parts)), name


def test_a_layout_that_the_configuration_does_not_lead_to_is_listed():
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = nn.Linear(64, 80)  # five heads, of which nobody said anything
    groups, unknown = groups_of(model, heads=True)
    assert unknown == ["model.layers.*.self_attn.q_proj.weight"]
    matrices = matrices_in(model, groups)
    assert matrices["model.layers.1.self_attn.q_proj.weight"] == [(80, 64)]
    assert matrices["model.layers.1.self_attn.k_proj.weight"] == 2 * [(16, 64)]


def test_a_model_of_anybody_has_its_matrices_listed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.attention = nn.MultiheadAttention(8, 2)
            self.mixer = nn.Linear(8, 12)
            self.convolution = nn.Conv2d(3, 4, 3)
            self.depthwise = nn.Conv1d(8, 8, 3, groups=8)
            self.head = nn.Linear(12, 10)

    model = Net()
    groups, unknown = groups_of(model, heads=True)
    assert unknown == ["mixer.weight", "convolution.weight"]
    matrices = {name: cut for name, cut in matrices_in(model, groups).items() if cut}
    assert matrices == {
        "attention.in_proj_weight": 6 * [(4, 8)],
        "attention.out_proj.weight": [(8, 8)],
        "mixer.weight": [(12, 8)],
        "convolution.weight": [(4, 27)],
    }


def test_exceptions_say_otherwise():
    model = build("llama")
    exceptions = {
        "*.0.self_attn.o_proj.weight": "adamw",
        "*.o_proj.weight": None,
        "*.down_proj.weight": [32, 32],
        "lm_head.weight": None,
    }
    groups, _ = groups_of(model, exceptions=exceptions)
    matrices = matrices_in(model, groups)
    assert matrices["model.layers.0.self_attn.o_proj.weight"] == []
    assert matrices["model.layers.1.self_attn.o_proj.weight"] == [(64, 64)]
    assert matrices["model.layers.1.mlp.down_proj.weight"] == 2 * [(32, 96)]
    assert matrices["lm_head.weight"] == [(128, 64)]


def test_what_cannot_be_sorted_is_refused():
    model = build("llama")
    message = "exceptions must be patterns of parameters' names, got '*.no_proj.weight'"
    with pytest.raises(ValueError, match=re.escape(message)):
        muon_groups(model, exceptions={"*.no_proj.weight": None})
    message = "exceptions['*'] must be 'adamw', None or a list of rows, got 'muon'"
    with pytest.raises(ValueError, match=re.escape(message)):
        muon_groups(model, exceptions={"*": "muon"})
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got \["):
        muon_groups(list(model.parameters()))


def test_entries_frozen_and_tied_parameters():
    model = build("llama", tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    groups, _ = groups_of(
        model, muon={"lr": 0.1}, adamw={"lr": 0.2}, vectors={"lr": 0.2, "weight_decay": 0.0}
    )
    numbers = {
        name: (group["use_muon"], group["lr"], group.get("weight_decay"))
        for group in groups
        for name, _ in group["params"]
    }
    assert not any(name.startswith("model.layers.0") for name in numbers)
    assert numbers["model.embed_tokens.weight"] == (False, 0.2, None)
    assert numbers["model.norm.weight"] == (False, 0.2, 0.0)
    assert numbers["model.layers.1.mlp.up_proj.weight"] == (True, 0.1, None)
    assert "lm_head.weight" not in numbers


def cuts_by_name(groups):
    return {
        name.replace("_orig_mod.", ""): (group["use_muon"], group.get("split_sizes"))
        for group in groups
        for name, _ in group["params"]
    }


def test_wrappers_and_shards_have_the_same_groups(tmp_path):
    expected = cuts_by_name(muon_groups(build("deepseek_v3"), heads=True))
    compiled = torch.compile(build("deepseek_v3"), backend="eager")
    assert cuts_by_name(muon_groups(compiled, heads=True)) == expected
    with group_of_one("gloo", tmp_path):
        sharded = build("deepseek_v3")
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        assert cuts_by_name(muon_groups(sharded, heads=True)) == expected


@pytest.mark.parametrize("name", list(MUON_PRESETS))
def test_presets_train(name):
    """A preset's model has a lower loss after a few steps, with groups that the preset asks for."""
    model = build("glm_moe_dsa" if name == "glm_5" else "llama")
    preset = MUON_PRESETS[name]
    groups, _ = groups_of(model, **preset.groups)
    optimizer = FusedMuon(groups, lr=0.01, **preset.options)
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    heads = [e for e in optimizer.describe() if "k_proj" in e.name or "kv_b_proj" in e.name]
    assert (len(heads[0].matrices) > 1) == (name in ("kimi_k3", "glm_5"))


@pytest.mark.parametrize(("name", "rms"), [("deepseek_v4", 0.18), ("kimi_k2", 0.2)])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (100, 100)])
def test_presets_updates_have_the_published_rms(name, rms, shape):
    """An orthogonal matrix [m, n] has the RMS 1 / sqrt(max(m, n)), which the factor makes rms."""
    adjust = MUON_PRESETS[name].options["adjust_lr_fn"]
    ratio = Orthogonal(((1.0, 0.0, 0.0),), adjust=adjust).ratio(shape)
    assert ratio == rms * max(shape) ** 0.5

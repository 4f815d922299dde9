"""Sorts a model's parameters into FusedMuon's groups: what is a matrix, and where it is cut.

A matrix of Muon is one linear map of the model's equations. What a model keeps in one parameter
may be several: q, k and v of a fused projection, gate and up of an MLP, the heads of attention,
the experts of a layer. PROJECTIONS says by name where the rows of each begin; the sizes are read
from the module that has the parameter, or from its configuration.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from megaopt.kernels.refusals import refuse, shown
from megaopt.params.names import plain_names
from megaopt.params.view import whole_shape_of

ADAMW = "adamw"
"""What an entry of `exceptions` says of parameters that AdamW steps."""
Sizes = tuple[int, ...] | None
"""The rows of each of several matrices, one below another; None: one matrix."""


class UnknownLayout(Exception):
    """A parameter's rows are not those that its module's configuration leads to."""


class Layer(NamedTuple):
    """A parameter that is a matrix or several, and what says how it is laid out."""

    sources: tuple[Any, ...]
    """The module that has the parameter's layer, and configurations, the nearest first."""
    rows: int
    """The rows of the parameter; of a batch of matrices those of each."""

    def number(self, *names: str) -> int:
        """Returns the first of these attributes that is a positive number, of the nearest source.

        Raises UnknownLayout where no source has one.
        """
        for source in self.sources:
            for name in names:
                value = getattr(source, name, None)
                if type(value) is int and value > 0:
                    return value
        raise UnknownLayout

    def has(self, name: str) -> bool:
        """Whether a source has a positive number of this name."""
        return any(type(getattr(source, name, None)) is int for source in self.sources)

    @property
    def head_size(self) -> int:
        """The rows of a head of q, k or v, where these are of one size."""
        if self.has("head_dim"):
            return self.number("head_dim")
        return self.number("hidden_size") // self.number("num_attention_heads", "num_heads")

    def check_rows(self, *counts: int) -> None:
        """Raises UnknownLayout unless the rows are one of these counts."""
        if self.rows not in counts:
            raise UnknownLayout


# --- where the rows of each matrix are: (layer, whether heads are apart) -> sizes


def whole(layer: Layer, heads: bool) -> Sizes:
    """One matrix."""
    return None


def query(layer: Layer, heads: bool) -> Sizes:
    """Heads of q; MLA's (DeepSeek-V3) have a part with and one without positions."""
    size = layer.number("qk_head_dim", "head_dim") if layer.has("head_dim") else layer.head_size
    count = layer.number("num_heads", "num_attention_heads")
    layer.check_rows(count * size)
    return (size,) * count if heads else None


def key_or_value(layer: Layer, heads: bool) -> Sizes:
    """Heads of k or v, of which several heads of q may share one."""
    size = layer.head_size
    counts = [
        layer.number(name)
        for name in ("num_key_value_heads", "num_heads", "num_attention_heads")
        if layer.has(name)
    ]
    layer.check_rows(*(count * size for count in counts))
    return (size,) * (layer.rows // size) if heads else None


def mla_key_and_value(layer: Layer, heads: bool) -> Sizes:
    """MLA's up-projection [heads x (k, v), rank]: k and v apart, of each head or of all."""
    sizes = (layer.number("qk_nope_head_dim"), layer.number("v_head_dim"))
    count = layer.number("num_heads", "num_attention_heads")
    layer.check_rows(count * sum(sizes))
    return sizes * count if heads else sizes


def mla_latents(layer: Layer, heads: bool) -> Sizes:
    """MLA's down-projection: the latent of k and v, and the part of k that has positions."""
    sizes = (layer.number("kv_lora_rank"), layer.number("qk_rope_head_dim"))
    layer.check_rows(sum(sizes))
    return sizes


def q_k_v_in_a_row(layer: Layer, heads: bool) -> Sizes:
    """All heads of q, then those of k, then those of v (Phi-3)."""
    size, count = layer.head_size, layer.number("num_heads", "num_attention_heads")
    shared = layer.number("num_key_value_heads") if layer.has("num_key_value_heads") else count
    layer.check_rows((count + 2 * shared) * size)
    if heads:
        return (size,) * (count + 2 * shared)
    return (count * size, shared * size, shared * size)


def q_k_v_of_each_head(layer: Layer, heads: bool) -> Sizes:
    """q, k and v of one head after another (GPT-NeoX)."""
    kinds = {getattr(source, "model_type", None) for source in layer.sources}
    if not kinds & {"gpt_neox", "gpt_neox_japanese", "bloom"}:  # others group heads (Falcon)
        raise UnknownLayout
    size, count = layer.head_size, layer.number("num_heads", "num_attention_heads")
    layer.check_rows(3 * count * size)
    return (size,) * (3 * count) if heads else (size,) * 3


def torch_q_k_v(layer: Layer, heads: bool) -> Sizes:
    """torch.nn.MultiheadAttention's in_proj_weight: q, k and v."""
    width, count = layer.number("embed_dim"), layer.number("num_heads")
    layer.check_rows(3 * width)
    return (width // count,) * (3 * count) if heads else (width,) * 3


def gate_and_up(layer: Layer, heads: bool) -> Sizes:
    """All rows of the gate, then all of up."""
    widths = ("intermediate_size", "moe_intermediate_size", "intermediate_dim", "ffn_dim")
    layer.check_rows(*(2 * layer.number(name) for name in widths if layer.has(name)))
    return (layer.rows // 2,) * 2


def indexer_heads(layer: Layer, heads: bool) -> Sizes:
    """The queries of DeepSeek's sparse attention, whose heads are not those of the attention."""
    size, count = layer.number("index_head_dim"), layer.number("index_n_heads")
    layer.check_rows(size * count)
    return (size,) * count if heads else None


def delta_heads(layer: Layer, heads: bool) -> Sizes:
    """Gates of Kimi's delta attention, a row for each channel of each head."""
    size = layer.number("linear_head_dim", "head_dim")
    count = layer.number("linear_num_heads", "num_heads")
    layer.check_rows(size * count)
    return (size,) * count if heads else None


PROJECTIONS: dict[str, Callable[[Layer, bool], Sizes]] = {
    "q_proj": query,
    "q_b_proj": query,
    "k_proj": key_or_value,
    "v_proj": key_or_value,
    "qkv_proj": q_k_v_in_a_row,
    "query_key_value": q_k_v_of_each_head,
    "in_proj_weight": torch_q_k_v,
    "kv_b_proj": mla_key_and_value,
    "kv_a_proj_with_mqa": mla_latents,
    "gate_up_proj": gate_and_up,
    "wq_b": indexer_heads,
    "f_b_proj": delta_heads,
    "g_b_proj": delta_heads,
    **dict.fromkeys(("o_proj", "out_proj", "q_a_proj", "wk", "f_a_proj", "g_a_proj"), whole),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "fc1", "fc2", "w1", "w2", "w3"), whole),
    **dict.fromkeys(("dense", "dense_h_to_4h", "dense_4h_to_h"), whole),
}
"""Layers by the last part of their names, in Hugging Face's models and torch.nn's."""
OUTPUTS = ("lm_head", "output", "output_layer", "embed_out", "score", "classifier", "head")
"""Names of output layers; a Hugging Face model says which it is too."""
ROUTERS = ("gate", "router", "shared_expert_gate", "weights_proj", "b_proj")
"""Layers whose rows are no features but experts or heads, a number for each."""


# --- the groups


def muon_groups(
    model: nn.Module,
    *,
    heads: bool = False,
    exceptions: Mapping[str, str | Sequence[int] | None] | None = None,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    vectors: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Returns groups for FusedMuon of the parameters of a model that are trained.

    Embeddings, output layers, routers, convolutions of one channel each, norms, biases and other
    vectors go to AdamW; all other matrices to Muon, cut into what the model's equations multiply
    by: q, k and v, gate and up, experts, and with `heads` the heads of attention. Known are the
    layers of Hugging Face's Llama, Mistral, Qwen, DeepSeek-V3, GLM, Phi-3, GPT-NeoX and Kimi
    Linear, by their names and their configuration, and torch.nn.MultiheadAttention. A matrix that
    is not known goes to Muon as one, and one UserWarning lists these.

        optimizer = FusedMuon(muon_groups(model, heads=True), lr=2e-4)

    After `fully_shard` as before it: shapes are those of whole parameters.

    Args:
        model: of transformers, or any other.
        heads: whether each head of q, k and v, and of MLA's up-projections, is a matrix of its own,
            as in Kimi K3 (arXiv:2607.24653) and GLM-5 (arXiv:2602.15763). `adjust_lr_fn` takes the
            shape of the matrix that is made orthogonal: that of a head.
        exceptions: by patterns of names (fnmatch), what else is done with parameters: "adamw";
            split_sizes, the rows of each matrix; or None, one matrix. The first match counts.
        muon: entries of the groups that Muon steps, such as {"lr": 2e-4}.
        adamw: entries of the group of embeddings, output layers and routers.
        vectors: entries of the group of norms, biases and vectors; None: as adamw's.

    Returns:
        Groups with (name, parameter) pairs as "params", "use_muon" and "split_sizes": one for each
        way in which matrices are cut, and two of AdamW's. `FusedMuon.describe` lists the matrices.

    Raises:
        TypeError: model is no torch.nn.Module.
        ValueError: an exception matches no parameter, or is none of the three.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
    rules = dict(exceptions or {})
    for pattern, rule in rules.items():
        is_sizes = isinstance(rule, (list, tuple)) and all(type(size) is int for size in rule)
        if rule not in (ADAMW, None) and not is_sizes:
            refuse(f"exceptions[{pattern!r}]", f"{ADAMW!r}, None or a list of rows", rule)

    matrices: dict[Sizes, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    embedded, flat, unknown, unmatched = [], [], [], set(rules)
    for name, plain, param, layer_name, sources in layers_of(model):
        entry = (name, param)
        pattern = next((pattern for pattern in rules if fnmatchcase(plain, pattern)), None)
        if pattern is not None:
            unmatched.discard(pattern)
            rule = rules[pattern]
            if isinstance(rule, str):
                embedded.append(entry)
            else:
                matrices[None if rule is None else tuple(rule)].append(entry)
            continue

        shape = whole_shape_of(param)
        is_convolution = isinstance(sources[0], nn.modules.conv._ConvNd)
        is_matrix = len(shape) in (2, 3) or (is_convolution and len(shape) > 3)
        is_depthwise = is_convolution and shape[1:2] == (1,)
        if not is_matrix or is_depthwise or plain.endswith("bias"):
            flat.append(entry)
        elif is_outside(param, layer_name, model, sources[0]):
            embedded.append(entry)
        else:
            # GPT-OSS keeps [input, output], so that what is cut elsewhere are columns here
            is_transposed = getattr(sources[0], "is_transposed", False)
            cut = None if is_transposed else PROJECTIONS.get(layer_name)
            sizes = None
            try:
                if cut is None:
                    raise UnknownLayout
                sizes = cut(Layer(sources, shape[-2]), heads)
            except UnknownLayout:
                unknown.append(plain)
            matrices[sizes].append(entry)

    if unmatched:
        refuse("exceptions", "patterns of parameters' names", sorted(unmatched)[0])
    if unknown:
        warnings.warn(
            "muon_groups does not know what these are made of, and takes each for one matrix of "
            f"Muon: {', '.join(numberless(unknown))}; exceptions= says otherwise",
            stacklevel=2,
        )
    groups = [
        {"params": params, **(muon or {}), "use_muon": True, "split_sizes": sizes}
        for sizes, params in matrices.items()
    ]
    of_vectors = adamw if vectors is None else vectors
    for params, entries in ((embedded, adamw), (flat, of_vectors)):
        if params:
            groups.append({"params": params, **(entries or {}), "use_muon": False})
    return groups


def layers_of(
    model: nn.Module,
) -> Iterator[tuple[str, str, nn.Parameter, str, tuple[Any, ...]]]:
    """Yields each trained parameter's name, its name without wrappers, and what says its layout.

    The name of its layer is that of its module, or its own where the module has several matrices
    (experts). The sources begin with the module, then those around it, each before its `config`.
    """
    modules = dict(model.named_modules())
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, plain in plain_names(params).items():
        *path, last = name.split(".")
        sources: list[Any] = []
        for depth in range(len(path), -1, -1):
            module = modules[".".join(path[:depth])]
            config = getattr(module, "config", None)
            # of models with several parts: that of text is the one with attention
            sources += [module, config, getattr(config, "text_config", None)]
        layer_name = plain.split(".")[-2] if last == "weight" and "." in plain else last
        yield name, plain, params[name], layer_name, tuple(s for s in sources if s is not None)


def is_outside(param: nn.Parameter, layer_name: str, model: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter is an embedding, an output layer or a router."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    for name in ("get_input_embeddings", "get_output_embeddings"):
        getter = getattr(model, name, None)
        end = getter() if callable(getter) else None
        if end is not None and getattr(end, "weight", None) is param:
            return True
    return layer_name in (*OUTPUTS, *ROUTERS)


def numberless(names: list[str]) -> list[str]:
    """The names with `*` for the numbers of layers, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))

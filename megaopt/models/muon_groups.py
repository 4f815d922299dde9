"""Sorts a model's parameters into FusedMuon's groups: what is a matrix, and where it is cut.

A matrix of Muon is one linear map of the model's equations. What a model keeps in one parameter
may be several: q, k and v of a fused projection, gate and up of an MLP, the heads of attention,
the experts of a layer. LAYOUTS says by the names of layers what their rows are; numbers are read
from the module that has the parameter, or from its configuration.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from megaopt.kernels.refusals import refuse, shown
from megaopt.params.names import plain_names
from megaopt.params.view import whole_shape_of

ADAMW = "adamw"
"""The word in `exceptions` for parameters that AdamW steps."""
Sizes = tuple[int, ...] | None
"""The rows of each of several matrices, one below another; None: one matrix."""


Names = tuple[str, ...]
"""Attributes of a module or a configuration; of one that has several the first counts."""

QUERIES: Names = ("num_heads", "num_attention_heads")
KEYS: Names = ("num_key_value_heads", *QUERIES)
"""The heads of k and v, of which several heads of q may share one."""
ONE: Names = ()
"""A part that has no heads."""
SIZE: Names = ("qk_head_dim", "head_dim")
WIDTH: Names = ("intermediate_dim", "moe_intermediate_size", "intermediate_size")


class RowLayout(NamedTuple):
    """The matrices that lie in the rows of a parameter."""

    parts: tuple[tuple[Names, Names], ...] = ()
    """The heads of each part, and the rows of a head; none: one matrix without heads."""
    is_interleaved: bool = False
    """Whether a head of each part comes before the next head of the first."""


WHOLE = RowLayout()
LAYOUTS = {
    "q_proj": RowLayout(((QUERIES, SIZE),)),
    "k_proj": RowLayout(((KEYS, SIZE),)),
    "v_proj": RowLayout(((KEYS, SIZE),)),
    # Phi-3 and torch.nn.MultiheadAttention: q of all heads, then k, then v
    "qkv_proj": RowLayout(((QUERIES, SIZE), (KEYS, SIZE), (KEYS, SIZE))),
    "in_proj_weight": RowLayout(((QUERIES, SIZE),) * 3),
    # GPT-NeoX, BLOOM: q, k and v of one head after another
    "query_key_value": RowLayout(((QUERIES, SIZE),) * 3, is_interleaved=True),
    # MLA (DeepSeek-V3): from the latents up to q, and to k and v of one head after another
    "q_b_proj": RowLayout(((QUERIES, SIZE),)),
    "kv_b_proj": RowLayout(
        ((QUERIES, ("qk_nope_head_dim",)), (QUERIES, ("v_head_dim",))), is_interleaved=True
    ),
    # and down to the latent of k and v, and the part of k that has positions
    "kv_a_proj_with_mqa": RowLayout(((ONE, ("kv_lora_rank",)), (ONE, ("qk_rope_head_dim",)))),
    "gate_up_proj": RowLayout(((ONE, WIDTH), (ONE, WIDTH))),
    # GLM-5: queries of the sparse attention's indexer, which has heads of its own
    "wq_b": RowLayout(((("index_n_heads",), ("index_head_dim",)),)),
    # Kimi Linear: gates of the delta attention, a row for each channel of each head
    "f_b_proj": RowLayout(((("linear_num_heads", *QUERIES), ("linear_head_dim", *SIZE)),)),
    "g_b_proj": RowLayout(((("linear_num_heads", *QUERIES), ("linear_head_dim", *SIZE)),)),
    **dict.fromkeys(("o_proj", "out_proj", "q_a_proj", "wk", "f_a_proj", "g_a_proj"), WHOLE),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "fc1", "fc2", "w1", "w2", "w3"), WHOLE),
    **dict.fromkeys(("dense", "dense_h_to_4h", "dense_4h_to_h"), WHOLE),
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

    # a Hugging Face model says which its embeddings and its output layer are
    getters = (getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output"))
    ends = [getattr(getter(), "weight", None) for getter in getters if callable(getter)]

    matrices: dict[Sizes, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    embedded: list[tuple[str, nn.Parameter]] = []
    flat: list[tuple[str, nn.Parameter]] = []
    unknown: list[str] = []
    unmatched = set(rules)
    for name, plain, param, layer_name, sources in layers_of(model):
        entry = (name, param)
        matching = [pattern for pattern in rules if fnmatchcase(plain, pattern)]
        if matching:
            unmatched.discard(matching[0])
            rule = rules[matching[0]]
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
        elif (
            isinstance(sources[0], (nn.Embedding, nn.EmbeddingBag))
            or any(param is end for end in ends)
            or layer_name in (*OUTPUTS, *ROUTERS)
        ):
            embedded.append(entry)
        else:
            # GPT-OSS keeps [input, output], so that what is cut elsewhere are columns here
            is_transposed = getattr(sources[0], "is_transposed", False)
            layout = None if is_transposed else LAYOUTS.get(layer_name)
            sizes, is_known = sizes_of(layout, shape[-2], sources, heads)
            if not is_known:
                unknown.append(plain)
            matrices[sizes].append(entry)

    if unmatched:
        refuse("exceptions", "patterns of parameters' names", sorted(unmatched)[0])
    if unknown:
        # each once, with `*` for the numbers of layers
        names = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in unknown)
        warnings.warn(
            "muon_groups does not know what these are made of, and takes each for one matrix of "
            f"Muon: {', '.join(names)}; exceptions= says otherwise",
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


def sizes_of(
    layout: RowLayout | None, rows: int, sources: Sequence[Any], heads: bool
) -> tuple[Sizes, bool]:
    """Returns the rows of each matrix, and whether they are known.

    rows: of the parameter, or of each of a batch of matrices; the parts must add up to them.
    """
    if layout is None or not layout.parts:
        return None, layout is not None
    counts, sizes = [], []
    for count_names, size_names in layout.parts:
        counts.append(number_of(sources, count_names) if count_names else 1)
        size = number_of(sources, size_names)
        if not size and size_names is SIZE:  # configurations without a head's size
            size = number_of(sources, ("hidden_size",)) // max(number_of(sources, QUERIES), 1)
        sizes.append(size)
    if sum(count * size for count, size in zip(counts, sizes, strict=True)) != rows:
        return None, False
    if layout.is_interleaved:
        # sizes that come again: without `heads` the rows of each, over all heads, are one matrix
        return tuple(sizes) * (counts[0] if heads else 1), True
    if heads:
        parts = zip(counts, sizes, strict=True)
        cut = tuple(size for count, size in parts for _ in range(count))
    else:
        cut = tuple(count * size for count, size in zip(counts, sizes, strict=True))
    return (cut if len(cut) > 1 else None), True


def number_of(sources: Sequence[Any], names: Names) -> int:
    """Returns the number that the nearest source with one of these attributes has; 0: none."""
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if type(value) is int and value > 0:
                return value
    return 0

"""Which tensor of a Hugging Face checkpoint is which weight: the tables, and what they say of one particular model.

A row reads: tensor, its axes, and the weights it holds with their axes (without the leading axis of stacked layers). A letter is an axis;
(h k) is an axis of the tensor that is two of the weight's, the second running faster; n|v is an axis whose first n entries belong to one
weight and the other v to another; a number is a place in the weight that the tensor fills. {e} in a name stands for every index of axis e.
A row whose weights a model does not have is skipped. Linear layers are stored [out, in] and used [in, out].
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from glm_jax.model.config import ModelConfig

Rows = tuple[tuple[str, str, dict[str, str]], ...]

MODEL: Rows = (
    ("model.embed_tokens.weight",                  "v d",        {"embedding": "v d"}),
    ("model.norm.weight",                          "d",          {"final_norm": "d"}),
    ("lm_head.weight",                             "v d",        {"head": "d v"}),
)

# Below model.layers.{i}. and, for the weights, dense_layers/ or moe_layers/.
MLA: Rows = (  # GLM-5, GLM-4.7-Flash, DeepSeek-V3.2
    ("self_attn.q_a_proj.weight",                  "r d",        {"attention/q_down": "d r"}),
    ("self_attn.q_a_layernorm.weight",             "r",          {"attention/q_norm": "r"}),
    ("self_attn.q_b_proj.weight",                  "(h k) r",    {"attention/q_up": "r h k"}),
    ("self_attn.kv_a_proj_with_mqa.weight",        "c d",        {"attention/kv_down": "d c"}),
    ("self_attn.kv_a_layernorm.weight",            "c",          {"attention/kv_norm": "c"}),
    ("self_attn.kv_b_proj.weight",                 "(h n|v) c",  {"attention/k_up": "h n c", "attention/v_up": "h c v"}),
    ("self_attn.o_proj.weight",                    "d (h v)",    {"attention/out": "h v d"}),
)
GQA: Rows = (  # GLM-4.5, Qwen3, Llama
    ("self_attn.q_proj.weight",                    "(h q k) d",  {"attention/q": "d h q k"}),
    ("self_attn.q_proj.bias",                      "(h q k)",    {"attention/q_bias": "h q k"}),
    ("self_attn.k_proj.weight",                    "(h k) d",    {"attention/k": "d h k"}),
    ("self_attn.k_proj.bias",                      "(h k)",      {"attention/k_bias": "h k"}),
    ("self_attn.v_proj.weight",                    "(h k) d",    {"attention/v": "d h k"}),
    ("self_attn.v_proj.bias",                      "(h k)",      {"attention/v_bias": "h k"}),
    ("self_attn.q_norm.weight",                    "k",          {"attention/q_norm": "k"}),
    ("self_attn.k_norm.weight",                    "k",          {"attention/k_norm": "k"}),
    ("self_attn.o_proj.weight",                    "d (h q k)",  {"attention/out": "h q k d"}),
)
LAYER: Rows = (
    ("input_layernorm.weight",                     "d",          {"attention_norm": "d"}),
    ("post_attention_layernorm.weight",            "d",          {"ffn_norm": "d"}),
)
DENSE: Rows = (
    ("mlp.gate_proj.weight",                       "f d",        {"ffn/gate": "d f"}),
    ("mlp.up_proj.weight",                         "f d",        {"ffn/up": "d f"}),
    ("mlp.down_proj.weight",                       "d f",        {"ffn/down": "f d"}),
)
MOE: Rows = (
    ("mlp.gate.weight",                            "e d",        {"moe/router": "d e"}),
    ("mlp.gate.e_score_correction_bias",           "e",          {"moe/router_bias": "e"}),
    ("mlp.shared_experts.gate_proj.weight",        "f d",        {"moe/shared_gate": "d f"}),
    ("mlp.shared_experts.up_proj.weight",          "f d",        {"moe/shared_up": "d f"}),
    ("mlp.shared_experts.down_proj.weight",        "d f",        {"moe/shared_down": "f d"}),
)
EXPERTS: Rows = (
    ("mlp.experts.{e}.gate_proj.weight",           "f d",        {"moe/gate_up": "e d 0 f"}),
    ("mlp.experts.{e}.up_proj.weight",             "f d",        {"moe/gate_up": "e d 1 f"}),
    ("mlp.experts.{e}.down_proj.weight",           "d f",        {"moe/down": "e f d"}),
)
FUSED_EXPERTS: Rows = (
    ("mlp.experts.gate_up_proj",                   "e (g f) d",  {"moe/gate_up": "e d g f"}),
    ("mlp.experts.down_proj",                      "e d f",      {"moe/down": "e f d"}),
)

# Below model.layers.{i}. of a full layer and, for the weights, indexer/ or mtp/indexer/.
INDEXER: Rows = (
    ("self_attn.indexer.wq_b.weight",              "(h k) r",    {"q_up": "r h k"}),
    ("self_attn.indexer.wk.weight",                "k d",        {"k": "d k"}),
    ("self_attn.indexer.k_norm.weight",            "k",          {"k_norm_gain": "k"}),
    ("self_attn.indexer.k_norm.bias",              "k",          {"k_norm_bias": "k"}),
    ("self_attn.indexer.weights_proj.weight",      "h d",        {"head_weights": "d h"}),
)

# Below model.layers.{number of layers}. and mtp/. That layer is also a layer as above, below mtp/layer/.
MTP: Rows = (
    ("embed_tokens.weight",                        "v d",        {"embedding": "v d"}),
    ("enorm.weight",                               "d",          {"embedding_norm": "d"}),
    ("hnorm.weight",                               "d",          {"hidden_norm": "d"}),
    ("eh_proj.weight",                             "o (t i)",    {"project": "t i o"}),
    ("shared_head.norm.weight",                    "d",          {"final_norm": "d"}),
    ("shared_head.head.weight",                    "v d",        {"head": "d v"}),
)

# Linear layers that block-scaled FP8 checkpoints keep in BF16, and all that is no linear layer (DeepSeek-V3, GLM-5-FP8).
NOT_FP8 = re.compile(r"embed_tokens|lm_head|norm|bias|mlp\.gate\.weight|weights_proj|eh_proj|shared_head")
# What old checkpoints hold besides weights.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class Share:
    """What of a tensor belongs to one weight. The tensor is seen with its finest axes (`Tensor.axes`).

    path     of the weight
    axis     by weight axis: the number of the tensor's axis that it is, or None where the tensor fills one index of the weight's
    index    by weight axis: that index
    box      by tensor axis: (start, stop) of what belongs to the weight
    """

    path: str
    axis: tuple[int | None, ...]
    index: tuple[int | None, ...]
    box: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint. `axes` is its shape with grouped axes taken apart; `groups` says into how many each axis is."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    groups: tuple[int, ...]
    shares: tuple[Share, ...]

    @property
    def may_be_fp8(self) -> bool:
        return len(self.shape) >= 2 and not NOT_FP8.search(self.name)

    def numbers(self, box: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """By axis of `shape`: the numbers of the rows, columns, ... that `box`, by axis of `axes`, holds."""
        found, at = [], 0
        for count in self.groups:
            sizes, ranges = self.axes[at : at + count], box[at : at + count]
            found.append(np.arange(math.prod(sizes)).reshape(sizes)[tuple(slice(*r) for r in ranges)].reshape(-1))
            at += count
        return found


def tensors_of(config: ModelConfig, shapes: dict[str, tuple[int, ...]], fused: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a model's checkpoint, by name, in the tables' order; empty ones (of no shared expert) left out.

    `shapes` are those of the model's weights by path; `fused` tells of a layer ("model.layers.3.") whether its experts are stored fused.
    """
    full = {layer: number for number, layer in enumerate(config.full_layers)}
    found = list(_expand(MODEL, "", "", None, shapes))

    def add_layer(name, stack, number, dense, indexer, indexer_number):
        found.extend(_expand((MLA if config.mla is not None else GQA) + LAYER, name, stack, number, shapes))
        if indexer_number is not None:
            found.extend(_expand(INDEXER, name, indexer, indexer_number, shapes))
        experts = () if dense else FUSED_EXPERTS if fused(name) else EXPERTS
        found.extend(_expand(DENSE if dense else MOE + experts, name, stack, number, shapes))

    for layer in range(config.layers):
        dense = layer < config.dense_layers
        stack, number = ("dense_layers/", layer) if dense else ("moe_layers/", layer - config.dense_layers)
        add_layer(f"model.layers.{layer}.", stack, number, dense, "indexer/", full.get(layer))
    for number in range(config.mtp.layers if config.mtp is not None else 0):
        name = f"model.layers.{config.layers + number}."
        found += _expand(MTP, name, "mtp/", number, shapes)
        add_layer(name, "mtp/layer/", number, config.moe is None, "mtp/indexer/", number if config.indexer is not None else None)
    return {tensor.name: tensor for tensor in found if math.prod(tensor.shape)}


def _expand(rows: Rows, name: str, stack: str, layer: int | None, shapes: dict[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """The tensors of these rows; `layer` is the index in the stacked weights' leading axis, None for weights that are not stacked."""
    for suffix, axes, weights in rows:
        weights = {stack + path: pattern for path, pattern in weights.items()}
        if not all(path in shapes for path in weights):
            continue
        unstacked = {path: shapes[path][layer is not None:] for path in weights}
        sizes = {letter: size for path, pattern in weights.items() for letter, size in zip(pattern.split(), unstacked[path], strict=True)}
        make = functools.partial(_tensor, axes=axes, weights=weights, sizes=sizes, layer=layer)
        if (each := re.search(r"{(\w)}", suffix)) is None:
            yield make(name + suffix, chosen={})
        else:
            for number in range(sizes[each[1]]):
                yield make(name + suffix.format(**{each[1]: number}), chosen={each[1]: number})


def _tensor(name: str, *, axes: str, weights: dict[str, str], sizes: dict[str, int], layer: int | None, chosen: dict[str, int]) -> Tensor:
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", axes)]
    fine = [several.split("|") for group in groups for several in group]  # by fine axis, the letters that lie on it one after another
    lengths = [sum(sizes[letter] for letter in letters) for letters in fine]
    shares = []
    for path, pattern in weights.items():
        own = pattern.split()
        axis = [next((number for number, letters in enumerate(fine) if letter in letters), None) for letter in own]
        index = [int(chosen.get(letter, letter)) if at is None else None for at, letter in zip(axis, own, strict=True)]
        box = []
        for letters in fine:
            mine = next(letter for letter in letters if letter in own)
            start = sum(sizes[letter] for letter in letters[: letters.index(mine)])
            box.append((start, start + sizes[mine]))
        stacked = layer is not None
        shares.append(Share(path, (*[None] * stacked, *axis), (*[layer] * stacked, *index), tuple(box)))
    count = iter(lengths)
    shape = tuple(math.prod(next(count) for _ in group) for group in groups)
    return Tensor(name, shape, tuple(lengths), tuple(map(len, groups)), tuple(shares))

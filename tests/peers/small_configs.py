"""The smallest config of a model of transformers, from its config class alone.

Every field keeps its default but for what makes a model large: widths, heads, layers, experts,
vocabularies, images. A rule goes by the field's name, so that a new model needs no line here;
OVERRIDES has what rules cannot know.
"""

import dataclasses
import re

from small_overrides import OVERRIDES, WHOLE
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 128
FIRST_WORD = 40  # smaller ids are special: every *_token_id has one of its own
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KEY_HEADS = {"num_key_value_heads": "num_attention_heads", "num_kv_heads": "num_heads"}
WINDOW = 5  # keys that a query sees in layers with a sliding window

# (a pattern of the whole name, the largest int that the field may have), the first that fits counts
LARGEST = [
    (r"num_channels|in_channels|in_chans|audio_channels|num_image_channels|type_vocab_size"
     r"|encoder_in_channels", None),
    (r"(.*_)?vocab_size.*|vocab_dim|codebook_size|num_embeddings|n_vocab|src_vocab_size",
     VOCABULARY),
    (r"(.*_)?(num_)?(kv|key_value)_heads|num_attention_groups|multi_query_group_num|n_head_kv", 2),
    (r"linear_num_value_heads", 4), (r"linear_num_key_heads", 2),
    (r".*(heads|n_head|n_heads)", 4),
    (r"(.*_)?head_dim|d_kv|v_head_dim|kv_channels|attention_head_size|projection_size", 16),
    (r".*lora_rank.*|.*_rank", 16),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth"
     r"|num_blocks|num_decoder_layers|num_encoder_layers|layers)", "layers"),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers|first_dense_layers", 1),
    (r"num_experts_per_tok|moe_k|moe_topk|top_k_experts|num_selected_experts|top_k|moe_top_k", 2),
    (r"(moe_)?(num_|n_)?(routed_|local_)?experts|n_routed_experts|num_local_experts", 4),
    (r"n_group|topk_group|max_window_layers", 1),
    (r"sliding_window|local_window_size", WINDOW),
    (r"(pretrain_)?image_size|img_size|input_size", 64),
    (r"patch_size", 16), (r"upsample_groups", 64),
    (r"(max|n)_(position|ctx|seq|source|target).*|.*max_position_embeddings|block_size"
     r"|seq_length|max_seq_len|num_position_embeddings", 128),
    (r"num_mel_bins|feature_size|mel_bins|n_mels", 16),
    (r"num_queries|num_query_tokens|num_latents|train_num_points|query_length", 8),
    (r".*(intermediate|ffn|ff|mlp|inner).*(size|dim)|.*_d_ff|d_ff|n_inner|d_inner|ff_dim", 64),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|embedding_dim"
     r"|projection_dim|emb_dim|output_dim|width|model_dim|dim|latent_dim|decoder_dim)"
     r"|embed_dim_per.*|.*hidden_size.*|.*_hidden_dim|.*hidden_channels|.*_channels", 64),
]
WIDTHS = len(LARGEST) - 2  # from here on the rules are of widths


def small_config(config_class, layers=2, narrow=True, **given):
    """A config whose fields are the defaults, cut to LARGEST; those given win.

    layers: how many, where the class does not say itself; a model of several kinds of layers may
    need more. narrow: cut the widths too, which some classes keep in several places.
    """
    given = {**OVERRIDES.get(config_class.__name__, {}), **given}
    if config_class.__name__ in WHOLE:
        return config_class(**given)
    parts = config_class.sub_configs_defaults
    for name in given.keys() & parts.keys():
        if isinstance(given[name], dict):
            given[name] = small_part(parts[name], layers, narrow, **given[name])
    fields, specials = {}, iter(range(3, FIRST_WORD))
    names = {field.name: default_of(field) for field in dataclasses.fields(config_class)}
    for name, default in names.items():
        if name in given:
            continue
        if re.fullmatch(r".*_token_(id|index)", name) and isinstance(default, int):
            fields[name] = SPECIAL.get(name) if name in SPECIAL else next(specials)
        elif name in parts:
            if default is not None or not parts[name].optional:
                fields[name] = small_part(parts[name], layers, narrow)
        elif (value := cut(name, default, layers, narrow)) != default:
            fields[name] = value
    for name in names.keys() & KEY_HEADS.keys():
        if names[name] is not None and names[name] == names.get(KEY_HEADS[name]):
            fields[name] = fields.get(KEY_HEADS[name], names[name])
    if "pad_token_id" in names:
        fields.setdefault("pad_token_id", 0)
    config = config_class(**{**fields, **given})
    if vars(config).get("head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if vars(config).get("num_key_value_heads", 0) is None:
        config.num_key_value_heads = config.num_attention_heads
    types = vars(config).get("layer_types")
    if types and set(types) == {"sliding_attention"} and len(types) > 1:
        config.layer_types = [*types[:-1], "full_attention"]  # some further layer is, by default
    return config


def default_of(field):
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def small_part(specification, layers, narrow, **given):
    """The config of a part: the words of its specification, cut too; those given win."""
    config_class = specification.config_class
    if config_class is AutoConfig:
        config_class = CONFIG_MAPPING[specification.model_type]
    words = {name: cut(name, value, layers, narrow)
             for name, value in (specification.init_kwargs or {}).items()}
    return small_config(config_class, layers, narrow, **{**words, **given})


def cut(name, value, layers, narrow):
    """The value, or its small stand-in."""
    rules = LARGEST if narrow else LARGEST[:WIDTHS]
    largest = next((largest for pattern, largest in rules if re.fullmatch(pattern, name)), None)
    if name == "use_sliding_window":
        return True
    if isinstance(value, (list, tuple)):
        return type(value)(cut_list(name, value, largest))
    if largest is None or isinstance(value, bool) or not isinstance(value, int):
        return value
    return min(value, layers if largest == "layers" else largest)


def cut_list(name, values, largest):
    """Lists of sizes, one a stage: in the proportion of the first."""
    if not values or not all(type(value) is int for value in values):
        return values
    if name == "depths" or largest == "layers":
        return [min(value, 2) for value in values]
    if largest is None or max(values) <= largest:
        return values
    if name in ("image_size", "img_size", "patch_size"):
        return [largest for _ in values]
    if len(set(values)) == 1:
        return [largest for _ in values]
    first = {4: 1, 64: 16}.get(largest, largest)
    return [max(1, value * first // values[0]) for value in values]

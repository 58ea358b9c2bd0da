"""Random arguments for the forward of a model of transformers, from its signature and config."""

import inspect
import itertools

import torch
from small_configs import FIRST_WORD, VOCABULARY

BATCH, LENGTH, ANSWER = 2, 12, 7
FRAMES, SAMPLES = 64, 2000


def parameters(model):
    return inspect.signature(model.forward).parameters


def part(config, *names):
    """The first of these attributes in the config or in its parts."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    parts += [getattr(each, name, None) for each in parts[1:] if hasattr(each, "sub_configs")
              for name in each.sub_configs]
    for each, name in itertools.product([each for each in parts if each is not None], names):
        found = getattr(each, name, None)
        if found is not None:
            return found
    return None


def text_config(config):
    try:
        return config.get_text_config()
    except ValueError:  # of two
        return config.get_text_config(decoder=True)


def words(config, length=LENGTH):
    """Tokens that are no special ones."""
    count = min(VOCABULARY, part(text_config(config), "vocab_size") or VOCABULARY)
    return torch.randint(min(FIRST_WORD, count // 2), count, (BATCH, length))


def images(config, *leading):
    size = part(config, "image_size", "img_size", "input_size")
    size = size if isinstance(size, (list, tuple)) else (size or 64,) * 2
    channels = part(config, "num_channels", "in_channels", "in_chans")
    channels = channels if isinstance(channels, int) else 3
    return torch.randn(BATCH, *leading, channels, *size[-2:])


def sounds(config):
    bins = part(config, "num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel",
                "mel_bins", "num_mels", "feature_projection_input_dim", "input_dim") or 16
    frames = part(config, "max_length") or 2 * (part(config, "max_source_positions") or FRAMES // 2)
    return [torch.randn(BATCH, bins, frames), torch.randn(BATCH, frames, bins),
            torch.randn(BATCH, 1, frames, bins)]


def choices(model):
    """Every set of arguments worth a try: a list of dicts, the likeliest first."""
    config, wanted = model.config, parameters(model)
    torch.manual_seed(1)
    made = [{}]

    def add(name, *values):
        nonlocal made
        if name in wanted:
            made = [{**each, name: value} for value in values for each in made]

    main = model.main_input_name
    if "input_ids" in wanted:
        tokens = words(config)
        add("input_ids", tokens)
        add("attention_mask", torch.ones_like(tokens))
        if "bbox" in wanted:
            add("bbox", torch.randint(0, 60, (BATCH, LENGTH, 4)).sort(-1).values)
    if "decoder_input_ids" in wanted:
        add("decoder_input_ids", words(config, ANSWER))
    if "pixel_values" in wanted and ("input_ids" not in wanted or main == "pixel_values"
                                     or is_required(wanted["pixel_values"]) or dual(model)):
        frames = part(config, "num_frames") or 2
        add("pixel_values", images(config), images(config, frames), *patches(config))
    if "pixel_values_videos" in wanted and main == "pixel_values_videos":
        frames = part(config, "frames_per_clip", "num_frames") or 2
        add("pixel_values_videos", images(config, frames))
    if "input_features" in wanted and (main == "input_features" or "input_ids" not in wanted):
        add("input_features", *sounds(config))
    if "input_values" in wanted and (main == "input_values" or "input_ids" not in wanted):
        add("input_values", torch.randn(BATCH, SAMPLES), torch.randn(BATCH, 1, SAMPLES),
            *sounds(config))
    for name, parameter in wanted.items():
        asked = is_required(parameter) or name in ALWAYS
        if name in made[0] or not asked:
            continue
        values = REQUIRED.get(name)
        if values is not None:
            add(name, *values(config))
    if "input_ids" in wanted and "pixel_values" in wanted:
        texts = [{**each} for each in made]
        for each in made:
            each.pop("pixel_values", None)
        made = [*texts, made[0], *({**made[0], "pixel_values": each}
                                   for each in (images(config), images(config, 1)))]
    return made


# What a forward needs though it has a default.
ALWAYS = ("future_values", "future_time_features", "flattened_patches")


def dual(model):
    """Whether a model compares or joins texts and images without places for these in the text."""
    return "get_text_features" in dir(model) or "bbox" in parameters(model)


def is_required(parameter):
    return (parameter.default is inspect.Parameter.empty
            and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def patches(config):
    """What models of Qwen-VL's kind take: rows of flattened patches."""
    patch, channels = part(config, "patch_size") or 16, part(config, "in_channels") or 3
    times = part(config, "temporal_patch_size") or 1
    if not all(isinstance(value, int) for value in (patch, channels, times)):
        return []
    return [torch.randn(32, channels * times * patch * patch)]


def hidden(config):
    width = part(config, "hidden_size", "d_model", "embed_dim") or 64
    return [torch.randn(BATCH, LENGTH, width), torch.randn(32, width)]


def numbered_patches(config):
    """Patches behind the row and the column where each lies, as Pix2Struct takes them."""
    places = torch.cartesian_prod(torch.arange(1.0, 3), torch.arange(1.0, 5)).expand(BATCH, 8, 2)
    return [torch.cat([places, torch.randn(BATCH, 8, text_config(config).hidden_size)], -1)]


def past(config):
    """Time series, as long as the model looks back."""
    length = part(config, "context_length") or 32
    lags = max(part(config, "lags_sequence") or [0])
    channels = part(config, "num_input_channels")
    values = torch.randn(BATCH, length + lags)
    return [values] if channels is None else [torch.randn(BATCH, length, channels)]


def features(config):
    return [torch.randn(*past(config)[0].shape[:2], part(config, "num_time_features") or 1)]


REQUIRED = {
    "past_values": past, "past_time_features": features,
    "past_observed_mask": lambda config: [torch.ones_like(past(config)[0])],
    "past_values_padding": lambda config: [torch.zeros_like(past(config)[0]).long()],
    "flattened_patches": numbered_patches,
    "freq": lambda config: [torch.zeros(BATCH, 1, dtype=torch.long)],
    "future_values": lambda config: [torch.randn(BATCH, part(config, "prediction_length") or 4)],
    "future_time_features": lambda config: [torch.randn(BATCH, 4, 1)],
    "noise_embeds": hidden, "context_hidden_states": hidden,
    "inputs_embeds": hidden, "hidden_states": lambda config: [*hidden(config), *patches(config)],
    "grid_thw": lambda config: [torch.tensor([[1, 4, 4], [1, 4, 4]])],
    "image_grid_thw": lambda config: [torch.tensor([[1, 4, 4], [1, 4, 4]])],
    "encoder_hidden_states": hidden, "query_embeds": hidden,
    "attention_mask": lambda config: [torch.ones(BATCH, LENGTH, dtype=torch.long)],
}

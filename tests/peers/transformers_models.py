"""Models of transformers, as small as they get, and what the attention layers in them compute."""

import copy
import dataclasses
import functools
import importlib
import inspect
from typing import NamedTuple

import numpy as np
import torch
from model_checks import of_dtype_of
from model_inputs import choices
from small_configs import small_config
from transformers import CONFIG_MAPPING, PreTrainedModel

from mha.parameters._names import best_forms, fits

ENDS = ("Model", "ForConditionalGeneration", "ForCausalLM", "ForMaskedLM", "Encoder")
LAYERS = 4
# Keys of configs that change attention, with values that no default is.
TELLING = {
    "num_key_value_heads": 2, "num_kv_heads": 2, "attention_multiplier": 0.3,
    "key_multiplier": 1.7, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0,
    "rms_norm_eps": 1e-2, "norm_eps": 1e-2,
    "scale_attn_by_inverse_layer_idx": True, "local_attention": 6, "window_size": 3,
    "use_bias": True, "attention_bias": True, "qkv_bias": True, "use_qkv_bias": True,
    "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2,
    "use_qk_norm": True, "multi_query": True}


def classes(model_type):
    """The model classes of a config, those that are whole first."""
    config_class = CONFIG_MAPPING[model_type]
    module = importlib.import_module(
        config_class.__module__.replace(".configuration_", ".modeling_"))
    found = [each for each in vars(module).values()
             if inspect.isclass(each) and issubclass(each, PreTrainedModel)
             and each.config_class is config_class and "PreTrainedModel" not in each.__name__]
    return sorted(found, key=lambda each: next(
        (place for place, end in enumerate(ENDS) if each.__name__.endswith(end)), len(ENDS)))


def telling_config(config_class, layers, **given):
    """The smallest config whose keys of attention have values that are no defaults."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    return small_config(config_class, layers, **{
        name: value for name, value in {**TELLING, **given}.items() if name in fields})


class Call(NamedTuple):
    """What an attention layer of a model took and gave."""

    prefix: str
    layer_index: int | None
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    output: np.ndarray


def fill(module, generator):
    """Numbers that make scores of about 1."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            numbers = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.ndim > 1 and "relative" not in name:
                numbers /= max(parameter.shape[0], parameter.shape[-1]) ** 0.5
            elif "norm" in name.lower():
                numbers = 1 + numbers / 4
            parameter.copy_(numbers)


def calls_of(model, layout, seed):
    """Those of all layers that have the names of a layout, of a random input."""
    names = list(model.state_dict())
    calls, attends = [], []
    generator = torch.Generator().manual_seed(seed)
    for path, module in model.named_modules():
        prefix = path + "." * bool(path)
        under = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        if not under or not fits(layout, under):
            continue
        numbers = [part for part in path.split(".") if part.isdigit()]
        index = getattr(module, "layer_idx", None)
        index = int(numbers[-1]) if index is None and numbers else index
        fill(module, generator)
        watch(module, best_forms(layout, under)[0], (prefix, index), calls)
        attends.append(module)
    reasons = []
    for call in (*(functools.partial(model, **arguments) for arguments in arguments_of(model)),
                 lambda: [module(torch.randn(2, 7, width_of(module), dtype=model.dtype))
                          for module in attends]):
        calls.clear()
        try:
            with torch.no_grad():
                call()
            return calls
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    raise RuntimeError("; ".join(reasons))


def arguments_of(model):
    """What is worth a try, without a cache."""
    wanted = inspect.signature(model.forward).parameters
    no_cache = {"use_cache": False} if "use_cache" in wanted else {}
    try:
        return [{**of_dtype_of(model, arguments), **no_cache} for arguments in choices(model)]
    except Exception:  # of a model that is a part of others
        return []


def width_of(module):
    """Of what goes into an attention layer."""
    return next(parameter.shape[-1] for parameter in module.parameters() if parameter.ndim == 2)


def watch(module, form, place, calls):
    """Let a layer's projections see inputs of about 1, and keep what it takes and gives."""
    seen = {}
    projections = {}
    for name, stored in form.items():
        for parameter in stored.holds:
            if parameter.startswith("W_"):
                projections[parameter] = module.get_submodule(name.rpartition(".")[0])

    def scaled(_, arguments):
        size = arguments[0].std()  # 0 where a decoder begins with zeros
        return (arguments[0] / size if size > 0 else arguments[0], *arguments[1:])

    def keep(name):
        def hook(_, arguments, output):
            seen[name] = arguments[0].numpy().copy()
            if name == "W_o":
                three = [seen.pop(f"W_{letter}") for letter in "qkv"]
                calls.append(Call(*place, *three, output.numpy().copy()))
        return hook

    inputs = {id(projection): projection for name, projection in projections.items()
              if name != "W_o"}
    for name, projection in projections.items():
        projection.register_forward_hook(keep(name))
    for projection in inputs.values():
        projection.register_forward_pre_hook(scaled)


def attention_of(model_type, layout, seed=0, **given):
    """A model's config, its state and the calls of its attention layers."""
    reasons = []
    for model_class in classes(model_type)[:5]:
        # Of few layers none may be one of attention; few models do not compute in float64.
        for layers, dtype in ((LAYERS, torch.float64), (2 * LAYERS, torch.float64),
                              (LAYERS, torch.float32)):
            try:
                config = telling_config(model_class.config_class, layers, **given)
                torch.manual_seed(seed)
                model = model_class._from_config(
                    copy.deepcopy(config), attn_implementation="eager",
                    experts_implementation="eager").eval().to(dtype)
                calls = calls_of(model, layout, seed)
            except Exception as error:
                reasons.append(f"{model_class.__name__}: {type(error).__name__}: {error}")
                continue
            if calls and all(np.isfinite(call.output).all() for call in calls):
                state = {name: array.numpy() for name, array in model.state_dict().items()}
                return model.config.to_dict(), state, calls
            reasons.append(f"{model_class.__name__}: no layer with the names of {layout.name}, or"
                           " numbers that are not finite")
    raise RuntimeError("; ".join(reasons))

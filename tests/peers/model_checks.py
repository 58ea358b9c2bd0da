"""A model of transformers under "mha" beside itself under "eager": what is compared, and how.

A check gives a word: "same", "refused: " by name, "eager: " and why there is nothing to compare,
"different: ", or "as sdpa: " where "eager" is alone with what it says. Figures are held to the gate
of the design: the error against "eager" in float64 is at most twice that of "eager" in float32, or
1e-6. Rows of queries that are padding are left out: what they hold means nothing, and "eager"
averages all values there.
"""

import copy
import warnings

import numpy as np
import torch
from model_inputs import choices, parameters
from transformers import AttentionInterface

FLOOR = 1e-6
LOOSE = 1e-5  # without float64 to tell
NEW_TOKENS = 8
SKIPPED = ("past_key_values", "attentions", "hidden_states", "loss", "cache")
_calls = [0]  # of mha's function


def count_calls():
    """Let mha's registered function count its calls."""
    function = AttentionInterface()["mha"]

    def counted(*arguments, **options):
        _calls[0] += 1
        return function(*arguments, **options)

    AttentionInterface.register("mha", counted)


def made_calls():
    return _calls[0]


def reason(error):
    """An error in a line of a table."""
    said = [line.strip() for line in str(error).strip().splitlines()] or [""]
    more = f" {said[1]}" if said[0].endswith(":") and len(said) > 1 else ""
    return f"{type(error).__name__}: {said[0]}{more}"[:200]


def built(cls, config, implementation):
    """The model with weights of its own, and what it warned of by mha's name."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = cls._from_config(copy.deepcopy(config), attn_implementation=implementation,
                                 experts_implementation="eager").eval()
    refusals = [str(warning.message) for warning in caught
                if "attends by code of its own" in str(warning.message)]
    return model, refusals


def randomise(model):
    """Numbers that make attention far from uniform, biases and norms included."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                parameter.normal_(0, 0.5 if parameter.ndim < 2 else parameter[0].numel()**-0.5)


class Pair:
    """A model under "eager" and its twin under "mha", in float32 and, once asked for, float64."""

    def __init__(self, cls, config):
        self.eager, _ = built(cls, config, "eager")
        self.mha, self.refusals = built(cls, config, "mha")
        own = copy.deepcopy(self.eager.state_dict())
        randomise(self.eager)
        self.arguments, reasons = self._accepted()
        if self.arguments is None:  # of numbers that are too far from those of training
            self.eager.load_state_dict(own)
            self.arguments, reasons = self._accepted()
        if self.arguments is None:
            raise ValueError("; ".join(dict.fromkeys(reasons)))
        self.mha.load_state_dict(self.eager.state_dict())
        self._double = {}

    def _accepted(self):
        """The first arguments that "eager" takes and gives numbers for, else why it does not."""
        reasons = []
        for arguments in choices(self.eager):
            try:
                found = results(self.eager, arguments)
            except Exception as error:
                reasons.append(reason(error))
                continue
            if all(vector.isfinite().all() for vector in found):
                return arguments, reasons
            reasons.append("numbers that are not finite")
        return None, reasons

    def double(self, name):
        if name not in self._double:
            self._double[name] = copy.deepcopy(getattr(self, name)).double()
        return self._double[name]

    def sdpa(self):
        """The third, under "sdpa": an error where the model does not take that."""
        model, _ = built(type(self.eager), self.eager.config, "sdpa")
        model.load_state_dict(self.eager.state_dict())
        return model


def outputs(model, arguments, counted=None):
    """All float tensors that a call returns; counted: which of (batch, len) are no padding."""
    torch.manual_seed(2)
    np.random.seed(2)
    arguments = of_dtype_of(model, arguments)
    if "use_cache" in parameters(model):
        arguments["use_cache"] = False
    found = list(tensors(model(**arguments)))
    if counted is not None:
        found = [tensor[counted] if tensor.shape[:2] == counted.shape else tensor
                 for tensor in found]
    return found


def of_dtype_of(model, arguments):
    dtype = next((parameter.dtype for parameter in model.parameters()
                  if parameter.is_floating_point()), torch.float32)
    return {name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point()
            else value for name, value in arguments.items()}


def tensors(value):
    if torch.is_tensor(value):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            if not any(word in name for word in SKIPPED):
                yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def results(model, arguments, counted=None):
    """Outputs, and the gradients of their weighed sum by all parameters, in one vector each."""
    model.zero_grad()
    flat = torch.cat([tensor.flatten() for tensor in outputs(model, arguments, counted)])
    gradients = torch.zeros(1)
    if flat.requires_grad:
        weights = torch.linspace(-1, 1, flat.numel(), dtype=torch.float64)
        (flat * weights.to(flat.dtype)).sum().backward()
        gradients = torch.cat([(torch.zeros_like(parameter) if parameter.grad is None
                                else parameter.grad).flatten()  # of experts that no token chose
                               for parameter in model.parameters()])
    return flat.detach().double(), gradients.double()


def same_numbers(pair, arguments, counted=None):
    """Words for the outputs and for the gradients."""
    eager = results(pair.eager, arguments, counted)
    ours = results(pair.mha, arguments, counted)
    try:
        exact = results(pair.double("eager"), arguments, counted)
        if not all(vector.isfinite().all() for vector in exact):
            raise ValueError("not finite")
    except Exception:  # code that makes float32 of its own
        exact = eager
    words = []
    for index, (wanted, theirs, found) in enumerate(zip(exact, eager, ours, strict=True)):
        if wanted.shape != found.shape:
            words.append(f"different: shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
            continue
        largest = wanted.abs().max().clamp_min(1e-30)
        error, eagers = (float((each - wanted).abs().max() / largest) for each in (found, theirs))
        allowed = max(2 * eagers, FLOOR if exact is not eager else LOOSE)
        if not error <= allowed and exact is not eager and error <= LOOSE + 50 * eagers:
            precise = results(pair.double("mha"), arguments, counted)[index]
            if float((precise - wanted).abs().max() / largest) <= FLOOR:
                error = 0.0  # what differed was rounding
        word = f"by {error:.1e} of the largest number, allowed {allowed:.1e}"
        if error <= allowed:
            word = "same"
        elif _near(pair, arguments, counted, index, found):
            word = f'as sdpa: "eager" differs from both {word}'
        else:
            word = f"different: {word}"
        words.append(word)
    return words


def _near(pair, arguments, counted, index, found):
    """Whether "sdpa" finds what "mha" found."""
    try:
        other = results(pair.sdpa(), arguments, counted)[index]
    except ValueError:  # that the model does not take
        return False
    return bool((found - other).abs().max() <= LOOSE * other.abs().max())


def padded(arguments, side):
    """The arguments with a first row that has some tokens less, and which tokens count."""
    real = torch.ones_like(arguments["attention_mask"])
    real[0, :real.shape[1] // 3] = 0
    if side == "right":
        real = real.flip(-1)
    tokens = arguments["input_ids"] * real  # padding is token 0
    return {**arguments, "input_ids": tokens, "attention_mask": real}, real.bool()


def generated(model, arguments, options):
    arguments = {name: value for name, value in of_dtype_of(model, arguments).items()
                 if name != "decoder_input_ids"}
    torch.manual_seed(3)
    with torch.no_grad():
        return model.generate(**arguments, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                              do_sample=False, pad_token_id=0, disable_compile=True,
                              **options).tolist()


def same_tokens(pair, arguments, options):
    """A word for the tokens that both generate, in float64 where those of float32 part ways."""
    assistant = options.pop("assistant", False)

    def by(model):
        if assistant:
            options["assistant_model"] = nudged(model)
        return generated(model, arguments, options)

    if assistant:  # one prompt at a time
        arguments = {name: value[:1] for name, value in arguments.items()}
    if pair.eager.config.is_encoder_decoder:
        options["decoder_start_token_id"] = 1

    try:
        wanted = by(pair.eager)
    except Exception as error:
        return f"eager: {reason(error)}"
    if by(pair.mha) == wanted:
        return "same"
    precise = by(pair.double("mha"))
    if precise == by(pair.double("eager")):
        return "same"
    try:
        other = by(pair.sdpa().double())
    except ValueError:  # that the model does not take
        other = None
    if precise == other:
        return 'as sdpa: "eager" has other tokens in float64'
    return "different: other tokens"


def nudged(model):
    """A model that often, not always, guesses right what this one says."""
    other = copy.deepcopy(model)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    return other


GENERATIONS = {"greedy": {}, "beams": {"num_beams": 3},
               "static": {"cache_implementation": "static"},
               "hybrid": {"cache_implementation": "hybrid"}, "assisted": {"assistant": True}}


def checks(pair):
    """Words by the name of the check, in the order of the table's columns."""
    found = {}

    def note(names, compute):
        try:
            words = compute()
        except NotImplementedError as error:
            words = [f"refused: {error}"] * len(names)
        except Exception as error:
            words = [f"error: {reason(error)}"] * len(names)
        found.update(zip(names, words, strict=True))

    note(["forward", "gradients"], lambda: same_numbers(pair, pair.arguments))
    text = "input_ids" in pair.arguments and "attention_mask" in pair.arguments
    inputs = pair.arguments
    for side in ("left", "right") if text else ():
        try:
            arguments, counted = padded(pair.arguments, side)
            results(pair.eager, arguments, counted)
        except Exception as error:
            found[side] = f"eager: {reason(error)}"
            continue
        inputs = arguments if side == "left" else inputs
        note([side, f"{side} gradients"], lambda a=arguments, c=counted: same_numbers(pair, a, c))
    if pair.eager.can_generate():
        for name, options in GENERATIONS.items():
            if name == "hybrid" and not has_windows(pair.eager.config):
                continue
            note([name], lambda o=options: [same_tokens(pair, inputs, dict(o))])
    return found


def has_windows(config):
    return any("sliding" in kind for kind in
               getattr(config.get_text_config(decoder=True), "layer_types", None) or [])

"""How a function or layer that someone else wrote is called and constructed, by its names."""

import functools
import inspect
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any, TypeGuard

import numpy as np

from mha.testing._diagnosis.aliases import Tested, TestedClass


class CannotTestError(Exception):
    """The tested code does not get as far as a comparison; the message says why."""


def plain(name: object) -> str:
    """The name without what people spell differently: case, underscores, digits."""
    return re.sub(r"[^a-z]", "", str(name).lower())


# Around the letter that matters: W_q, fc_q, q_proj, linear_query, to_q, w_qs, query_layer.
_AROUND = (r"(?:w|weights?|fc|linears?|lin|layers?|proj(?:ections?|s)?|dense|to|in"
           r"|mat(?:rix|rices)?|kernel|params?|attn|attention|self|transform|mha|net|heads?|all|multi|s)*?")
_MATRICES = {
    "qkv": r"(?:qkv|kqv|cattn|inproj|querykeyvalue)", "kv": r"(?:kv|keyvalue)",
    "W_q": r"(?:q|quer(?:y|ies)|que)", "W_k": r"(?:k|keys?)", "W_v": r"(?:v|val(?:ues?)?)",
    "W_o": r"(?:o|out(?:puts?)?|cproj|final|combined?|unify|merged?|concat(?:enated)?"
           r"|proj(?:ection)?|dense|fc|result)",
}
_WEIGHTLIKE = re.compile(r"^w|w$|weight|proj|linear|fc|dense|kernel|cattn|matri")


def matrix_named(name: object) -> str | None:
    """W_q, W_k, W_v, W_o, qkv, kv, or for a bias b_q ... b_qkv; None for anything else."""
    name = plain(re.sub(r"^([wWbB]_?)0$", r"\1o", str(name)))
    if name in ("battn", "attnb", "attnbias"):  # of c_attn
        return "b_qkv"
    without_bias = re.sub(r"^b(?:ias)?|(?:bias|b)$", "", name, count=1)
    for spelled, is_bias in ((name, False), (without_bias, True)):
        if is_bias and (spelled == name or not spelled):
            continue
        for role, core in _MATRICES.items():
            if re.fullmatch(f"{_AROUND}{core}{_AROUND}", spelled):
                return ("b_" + role.removeprefix("W_")) if is_bias else role
    return None


_SIZES = {
    "num_heads": ("numheads", "nheads", "heads", "h", "nhead", "numheadsq", "numattentionheads",
                  "nhs", "headnum", "headcount", "numhead", "nh", "numqueryheads", "headsnum"),
    "num_kv_heads": ("numkvheads", "nkvheads", "numkeyvalueheads", "kvheads", "numkvgroups",
                     "numgroups", "ngroups", "numqueryGroups".lower(), "nkv"),
    "d_model": ("dmodel", "embeddim", "numhiddens", "hiddensize", "hiddendim", "dim", "modeldim",
                "embedsize", "nembd", "d", "width", "keysize", "querysize", "valuesize", "din",
                "dout", "indim", "outdim", "inputdim", "outputdim", "embdim", "dembed", "emb",
                "embeddingdim", "embeddingsize", "embsize", "infeatures", "outfeatures", "nstate",
                "inputsize", "outputsize", "inchannels", "outchannels", "dimmodel", "units",
                "modelsize", "numfeatures", "features", "nfeatures", "channels", "c", "e",
                "querydim", "keyinputdim", "kdim", "vdim", "qdim", "dhidden", "ninp", "nembed"),
    "head_dim": ("headdim", "dk", "dv", "headsize", "dhead", "dimhead", "dq", "dimk", "dimv",
                 "keydim", "valuedim", "headwidth", "dkey", "dvalue", "sizeperhead", "dimperhead"),
    "length": ("blocksize", "contextlength", "maxlen", "maxseqlen", "seqlen", "contextsize",
               "maxlength", "nctx", "maxsequencelength", "maxpositionembeddings", "sequencelength",
               "contextlen", "maxcontext", "npositions", "seqlength", "t", "windowsize"),
    "dropout": ("dropout", "p", "dropoutrate", "dropoutp", "pdrop", "attnpdrop", "residpdrop",
                "dropoutprob", "dropprob", "attentiondropout", "attndropout", "attnpdropout"),
    "seed": ("seed", "rng", "randomstate", "key"),
    "bias": ("bias", "usebias", "qkvbias", "addbias"),
    "config": ("config", "cfg", "args", "hparams", "conf", "configuration", "settings"),
}


def size_named(name: object) -> str | None:
    """num_heads, d_model ...: the size that a parameter or attribute of this name holds."""
    return next((known for known, spellings in _SIZES.items() if plain(name) in spellings), None)


# Calling.


@dataclass
class Signature:
    """How the arrays and options of a callable are handed over.

    inputs: the names of the parameters for query, key and value; None: by position. roles: which
    of query (0), key (1) and value (2) each of them takes. options: {name: kind}. given: arguments
    that every call gets. untested: options that nothing here knows how to test.
    """

    inputs: list[str | None]
    roles: list[int]
    options: dict[str, str] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    untested: list[str] = field(default_factory=list)
    second: str = ""  # of two inputs the second, where it has a default

    def alone(self) -> "Signature":
        """The same with the first of two inputs, and without the options of the second."""
        its_own = [name for name in self.options
                   if name.split("_")[0] == self.second.split("_")[0]]
        return replace(self, inputs=self.inputs[:1], roles=[0], second="", options={
            name: kind for name, kind in self.options.items() if name not in its_own},
            untested=[*self.untested, self.second, *its_own])


_SILENT = re.compile(r"rng|seed|generator|out|name|dtype|device|verbose|debug|axis|dim|eps|epsilon"
                     r"|precision|heads?|numheads|nheads|inplace|return.*|kwargs|args|cfg|config"
                     r"|training|train|istraining|deterministic|dmodel|dk|dv|headdim|plot|show")
_ROLES = (r"(?:x|inputs?|in|target|src|tgt)?(?:q|qs|quer(?:y|ies)|que)(?:x|inputs?|in|s|heads?|seq"
          r"|vectors?|mat|matrix|states?|layer|tensor|proj)?",
          r"(?:x|inputs?|in|src|memory|tgt)?(?:k|ks|keys?)(?:x|inputs?|in|s|heads?|seq|vectors?|mat"
          r"|matrix|states?|layer|tensor|proj)?",
          r"(?:x|inputs?|in|src|memory|tgt)?(?:v|vs|val|vals|values?)(?:x|inputs?|in|s|heads?|seq"
          r"|vectors?|mat|matrix|states?|layer|tensor|proj)?")
_SECOND = re.compile(r"y|context|memory|encoder.*|enc.*|kv|keyvalues?|xkv|kvinput|other|source|src"
                     r"|kvstates|keyvaluestates|crossinput|ctx|z|xkvinput|xenc|cond")


def _role(name: str) -> int | None:
    return next((index for index, pattern in enumerate(_ROLES)
                 if re.fullmatch(pattern, plain(name))), None)


def _kind(parameter: Parameter) -> str | None:
    """Which option a parameter is: "causal", "mask" ..., "untested", or None: no option."""
    name, default = plain(parameter.name), parameter.default
    is_flag = isinstance(default, (bool, np.bool_))
    if re.search(r"(return|need|output)\w*(weight|attn|attention|score|prob)", name):
        return "silent" if "average" in name else "weights"
    if "causal" in name or name in ("autoregressive", "lookahead", "unidirectional", "isdecoder",
                                    "decoder", "masked", "maskfuture", "usemask", "applymask",
                                    "decodermode", "futuremask", "lookaheadmask"):
        return "mask" if name.endswith("mask") and not is_flag and default is None and not \
            re.match("use|is|apply|do|with", name) else "causal"
    if "mask" in name:
        return "causal" if is_flag else "key_mask" if re.search("pad|key", name) else "mask"
    if re.search(r"len|lens|lengths?", name) and "max" not in name and name not in _SIZES["length"]:
        return "lengths"
    if re.search(r"dropout|pdrop|dropprob|droprate", name) or name == "p":
        return "dropout"
    if name in ("training", "train", "istraining"):
        return "training"
    if name in ("scale", "scaling", "scalefactor", "smscale", "softmaxscale", "temperature", "tau",
                "scaled", "usescale", "scalebysqrt"):
        return "scale"
    if name in ("bias", "attnbias", "attentionbias", "scorebias", "positionbias"):
        return "bias" if not is_flag else "untested"
    if re.fullmatch(_SILENT, name) or parameter.name.startswith("_"):
        return "silent"
    return None


def parameters_of(function: object) -> dict[str, Parameter]:
    """The parameters by name, in order; empty where Python cannot tell."""
    try:
        return dict(inspect.signature(function).parameters) if callable(function) else {}
    except (TypeError, ValueError):
        return {}


def signature(function: Tested, taken: Collection[str] = ()) -> Signature:
    """The Signature of a callable; `taken` are parameters that get something else already."""
    parameters = [p for p in parameters_of(function).values() if p.name not in taken]
    if not parameters:
        return Signature([None] * 3, [0, 1, 2])
    found = Signature([], [])
    arrays, starred = [], False
    caches = any("cache" in plain(p.name) for p in parameters)
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            starred = True
        elif p.kind is not p.VAR_KEYWORD:
            kind = None if _role(p.name) is not None else _kind(p)
            required = p.default is p.empty
            if kind == "lengths" and caches and kind in found.options.values():
                kind = "untested"  # how much of a call is appended, beside how many keys are real
            if kind is None and (required or p.default is None):
                arrays.append(p)
            elif kind in ("silent", "dropout", "training") or kind is None:
                if kind == "training":
                    found.given[p.name] = False
                elif kind == "dropout" and (required or p.default):
                    found.given[p.name] = 0.0
                elif required and size_named(p.name) is None:
                    arrays.append(p)
                if kind == "dropout" or kind is None:
                    found.untested.append(p.name)
            elif kind == "untested":
                found.untested.append(p.name)
            else:
                found.options[p.name] = kind
                if kind == "causal" and p.default is True:
                    found.given[p.name] = False
                elif kind == "scale" and p.default is False:
                    found.given[p.name] = True
                if required:
                    found.required.add(p.name)
    _choose_inputs(found, arrays, starred)
    return found


def _choose_inputs(found: Signature, arrays: list[Parameter], starred: bool) -> None:
    """Which parameters take query, key and value."""
    by_role: dict[int | None, Parameter] = {}
    for p in arrays:
        by_role.setdefault(_role(p.name), p)
    wanted = [p for p in arrays if p.default is p.empty]
    unknown = [p for p in arrays if _role(p.name) is None]
    if {0, 1, 2} <= by_role.keys():
        chosen = [p for p in arrays if any(p is by_role[r] for r in (0, 1, 2))]
        found.roles = [role for p in chosen if (role := _role(p.name)) is not None]
    elif {1, 2} <= by_role.keys() and unknown:  # (x, key=None, value=None)
        chosen = [unknown[0], by_role[1], by_role[2]]
        found.roles = [0, 1, 2]
    elif starred and not wanted:
        found.inputs, found.roles = [None] * 3, [0, 1, 2]
        return
    elif len(wanted) >= 3:
        chosen, found.roles = wanted[:3], [0, 1, 2]
    else:
        second = [p for p in arrays[1:] if re.fullmatch(_SECOND, plain(p.name)) or p in wanted]
        chosen = [*arrays[:1], *second[:1]]
        found.roles = list(range(len(chosen)))
        found.second = next((p.name for p in chosen[1:] if p.default is not p.empty), "")
    found.inputs = [None if p.kind is p.POSITIONAL_ONLY else p.name for p in chosen]
    found.untested += [p.name for p in arrays if p not in chosen and p.default is not p.empty]


# Constructing.


class _Config:
    """A configuration object that knows every usual name: config.n_embd, config["num_heads"]."""

    def __init__(self, values: dict[str, object]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> object:
        known = size_named(name)
        if name.startswith("_") or known is None or known not in self._values:
            raise AttributeError(name)
        return self._values[known]

    def __getitem__(self, name: str) -> object:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


def construct(layer_class: TestedClass, heads: int, head_dim: int, kv_heads: int | None = None,
              **options: object) -> object:
    """An instance with these many heads, of this size, and with these options."""
    values: dict[str, object] = {
        "d_model": heads * head_dim, "num_heads": heads, "head_dim": head_dim, "dropout": 0.0,
        "seed": 0, "bias": True, "length": 64, "num_kv_heads": kv_heads or heads}
    values["config"] = _Config(dict(values))
    given: dict[str, object] = {}
    unknown = []
    parameters = list(parameters_of(layer_class).values())
    for parameter in parameters:
        known, required = size_named(parameter.name), parameter.default is parameter.empty
        if "VAR" in parameter.kind.name:
            continue
        if known in ("bias", "length") and not required:
            continue
        if known == "num_kv_heads" and not required and kv_heads is None:
            continue
        if known == "head_dim" and not required and parameter.default is None:
            continue
        if known in values:
            given[parameter.name] = values[known]
        elif _kind(parameter) == "causal" and required:
            given[parameter.name] = False
        elif required:
            unknown.append(parameter.name)
    if unknown:
        raise CannotTestError(f"cannot construct {layer_class.__name__}: what is"
                              f" {', '.join(unknown)}? Construct it, and diagnose the instance")
    given.update(options)
    by_position = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY
                   and p.name in given]
    try:
        return layer_class(*by_position, **given)
    except (Exception, SystemExit) as error:
        raise CannotTestError(f"constructing {layer_class.__name__} raised"
                              f" {type(error).__name__}: {error}") from None


def takes_size(thing: TestedClass | Tested, *sizes: str) -> bool:
    """Whether one of its parameters is such a size: "num_heads", "num_kv_heads", "config"."""
    return any(size_named(name) in sizes for name in parameters_of(thing))


def flags_of(layer_class: TestedClass) -> dict[str, bool]:
    """{name: its other value} of the causal flags that a class is constructed with."""
    return {p.name: not p.default for p in parameters_of(layer_class).values()
            if isinstance(p.default, bool) and _kind(p) == "causal"}


def is_function(thing: object) -> TypeGuard[Tested]:
    return inspect.isroutine(thing) or isinstance(thing, functools.partial)


def weight_parameters(function: Tested) -> dict[str, str]:
    """{name: matrix} of the parameters of a function that take weights and biases."""
    return {name: role for name, parameter in parameters_of(function).items()
            if "VAR" not in parameter.kind.name and (role := matrix_named(name))
            and ((role[0] == "b" and len(plain(name)) > 1) or _WEIGHTLIKE.search(plain(name)))
            and _kind(parameter) in (None, "silent")}

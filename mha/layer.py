"""MultiHeadAttention: the figure as a layer that owns its parameters."""

import math
import operator

import numpy as np

from mha import _core
from mha.dropout import seed_for

__all__ = ["MultiHeadAttention"]

WEIGHTS = ("W_q", "W_k", "W_v", "W_o")
BIASES = ("b_q", "b_k", "b_v", "b_o")


class MultiHeadAttention:
    """Multi-head attention with its parameters (Vaswani et al. 2017, section 3.2.2).

    Parameters
    ----------
    embed_dim : int
        The width of query and output, unless query_dim and output_dim say otherwise.
    num_heads : int
        Must divide embed_dim, unless head_dim is given.
    use_bias : bool
        Whether the four projections have biases (they start as zeros).
    dropout : float in [0, 1)
        On the attention weights; acts only in calls with training=True.
    num_kv_heads : int, by default num_heads
        Key and value heads, each serving num_heads / num_kv_heads query heads.
    head_dim, value_head_dim : int, by default embed_dim / num_heads, and head_dim
    query_dim, key_dim, value_dim, output_dim : int, by default embed_dim, embed_dim, key_dim,
        embed_dim
    dtype : numpy.float32 or numpy.float64
        The layer computes in it and returns it.
    rng : None, int or numpy.random.Generator
        Draws the Xavier-uniform start (Glorot & Bengio 2010) of the weights.

    Attributes
    ----------
    W_q (query_dim, num_heads * head_dim), W_k (key_dim, num_kv_heads * head_dim),
    W_v (value_dim, num_kv_heads * value_head_dim), W_o (num_heads * value_head_dim, output_dim):
    used as x @ W. b_q, b_k, b_v, b_o: their biases, or None.

    >>> layer = mha.MultiHeadAttention(512, 8, rng=0)
    >>> layer(np.ones((2, 10, 512), np.float32)).shape
    (2, 10, 512)
    """

    def __init__(self, embed_dim, num_heads, *, use_bias=True, dropout=0.0, num_kv_heads=None,
                 head_dim=None, value_head_dim=None, query_dim=None, key_dim=None, value_dim=None,
                 output_dim=None, dtype=np.float32, rng=None):
        self.embed_dim = _size(embed_dim, "embed_dim")
        self.num_heads = _size(num_heads, "num_heads")
        self.num_kv_heads = _size(num_kv_heads, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {self.num_kv_heads}, wanted a divisor of"
                             f" num_heads ({self.num_heads})")
        if head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim: got {self.embed_dim}, wanted a multiple of num_heads"
                             f" ({self.num_heads}); or give head_dim")
        self.head_dim = _size(head_dim, "head_dim", self.embed_dim // self.num_heads)
        self.value_head_dim = _size(value_head_dim, "value_head_dim", self.head_dim)
        self.query_dim = _size(query_dim, "query_dim", self.embed_dim)
        self.key_dim = _size(key_dim, "key_dim", self.embed_dim)
        self.value_dim = _size(value_dim, "value_dim", self.key_dim)
        self.output_dim = _size(output_dim, "output_dim", self.embed_dim)
        self.dropout = _probability(dropout)
        self.use_bias = bool(use_bias)
        self.dtype = _layer_dtype(dtype)
        self._packed = None
        self._parameters = self._xavier_uniform(rng)

    def _shapes(self):
        """The shape of every parameter by its name."""
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        values = self.num_kv_heads * self.value_head_dim
        merged = self.num_heads * self.value_head_dim
        shapes = {"W_q": (self.query_dim, queries), "W_k": (self.key_dim, keys),
                  "W_v": (self.value_dim, values), "W_o": (merged, self.output_dim)}
        if self.use_bias:
            shapes |= {"b" + name[1:]: shape[1:] for name, shape in shapes.items()}
        return shapes

    def _xavier_uniform(self, rng):
        """Weights uniform in +-sqrt(6 / (in + out)), biases zero."""
        generator = np.random.default_rng(rng)
        start = {}
        for name, shape in self._shapes().items():
            if name in BIASES:
                start[name] = np.zeros(shape, self.dtype)
            else:
                weight = generator.random(shape, self.dtype)
                weight -= self.dtype.type(0.5)
                weight *= self.dtype.type(2 * math.sqrt(6 / sum(shape)))
                start[name] = weight
        return start

    def __call__(self, query, key=None, value=None, *, mask=None, bias=None, key_lengths=None,
                 causal=False, query_offset=None, window=None, scale=None, softcap=None,
                 empty_rows="zeros", training=False, rng=None, head_gate=None,
                 return_weights=False, return_lse=False):
        """Attend: query (batch, query_len, query_dim) -> output (batch, query_len, output_dim).

        key defaults to query, value to key; 2-D input is one sequence. The options are those of
        `mha.scaled_dot_product_attention`; mask and bias have 2 dimensions (query_len, key_len)
        or 4 (batch, heads, query_len, key_len), either of batch and heads may be 1. Dropout acts
        only with training=True. Returns the output, then the weights
        (batch, heads, query_len, key_len) and lse (batch, heads, query_len) where asked for.
        """
        key = query if key is None else key
        value = key if value is None else value
        _check_dimensions(mask, "mask")
        _check_dimensions(bias, "bias")
        dropout = self.dropout if training else 0.0
        weights = self._packed or self._parameters
        parameters = self._parameters
        return _core.multi_head_attention(
            query, key, value, weights["W_q"], weights["W_k"], weights["W_v"], weights["W_o"],
            parameters.get("b_q"), parameters.get("b_k"), parameters.get("b_v"),
            parameters.get("b_o"), self.num_heads, self.num_kv_heads, head_gate, mask, bias,
            key_lengths, causal, query_offset, window, scale, softcap, empty_rows, dropout,
            seed_for(dropout, rng), return_weights, return_lse, self.dtype)

    def parameters(self):
        """The live arrays by name: changing one in place changes the layer."""
        return dict(self._parameters)

    def load_parameters(self, mapping):
        """Copy the arrays of a mapping with the names of `parameters()` into the layer.

        Raises ValueError for missing or unknown names and wrong shapes, before anything changes.
        """
        self._check_not_frozen()
        missing = sorted(self._parameters.keys() - mapping.keys())
        unknown = sorted(mapping.keys() - self._parameters.keys())
        if missing or unknown:
            raise ValueError(f"mapping: missing {missing}, unknown {unknown}; wanted exactly"
                             f" {sorted(self._parameters)}")
        self._parameters = {name: self._checked(name, mapping[name]).copy()
                            for name in self._parameters}

    @property
    def num_parameters(self):
        """How many numbers the layer learns: 4 * embed_dim**2 without biases in the plain case."""
        return sum(parameter.size for parameter in self._parameters.values())

    def astype(self, dtype):
        """A copy of the layer that computes in dtype."""
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(self.__dict__, dtype=_layer_dtype(dtype), _packed=None)
        other._parameters = {name: parameter.astype(other.dtype)
                             for name, parameter in self._parameters.items()}
        return other

    def freeze(self):
        """Copy and pack the parameters for inference: faster, and read-only until `unfreeze()`.

        The result's bits stay the same. Returns the layer.
        """
        if self._packed is None:
            copies = {name: parameter.copy() for name, parameter in self._parameters.items()}
            self._packed = {name: _core.pack_weight(copies[name]) for name in WEIGHTS}
            for parameter in copies.values():
                parameter.flags.writeable = False
            self._parameters = copies
        return self

    def unfreeze(self):
        """Make the parameters writable again. Returns the layer."""
        if self._packed is not None:
            self._packed = None
            self._parameters = {name: parameter.copy()
                                for name, parameter in self._parameters.items()}
        return self

    @property
    def frozen(self):
        """Whether `freeze()` is in force."""
        return self._packed is not None

    def _check_not_frozen(self):
        if self._packed is not None:
            raise ValueError("the layer is frozen: call unfreeze() before changing a parameter")

    def _checked(self, name, array):
        array = np.asarray(array)
        wanted = self._shapes()[name]
        if array.dtype.kind not in "iuf":
            raise TypeError(f"{name}: got an array of {array.dtype}, wanted {self.dtype}")
        if array.shape != wanted:
            raise ValueError(f"{name}: got shape {array.shape}, wanted {wanted}")
        return array.astype(self.dtype, copy=False)

    def _get_parameter(self, name):
        return self._parameters.get(name)

    def _set_parameter(self, name, array):
        self._check_not_frozen()
        if name in BIASES and not self.use_bias:
            raise ValueError(f"{name}: the layer was made with use_bias=False")
        self._parameters[name] = self._checked(name, array)

    def __getstate__(self):
        return {**self.__dict__, "_packed": self._packed is not None}

    def __setstate__(self, state):
        self.__dict__.update(state, _packed=None)
        if state["_packed"]:
            self.freeze()

    def __deepcopy__(self, memo):
        return self._copied(lambda parameter: parameter.copy())

    def __copy__(self):
        return self._copied(lambda parameter: parameter)

    def _copied(self, copy_parameter):
        other = self.__class__.__new__(self.__class__)
        other.__dict__.update(self.__dict__, _packed=None)
        other._parameters = {name: copy_parameter(parameter)
                             for name, parameter in self._parameters.items()}
        return other.freeze() if self.frozen else other

    def __repr__(self):
        shown = [str(self.embed_dim), str(self.num_heads)]
        plain = {"use_bias": True, "dropout": 0.0, "num_kv_heads": self.num_heads,
                 "head_dim": self.embed_dim // self.num_heads, "value_head_dim": self.head_dim,
                 "query_dim": self.embed_dim, "key_dim": self.embed_dim,
                 "value_dim": self.key_dim, "output_dim": self.embed_dim}
        shown += [f"{name}={getattr(self, name)}" for name, default in plain.items()
                  if getattr(self, name) != default]
        shown += [f"dtype={self.dtype}"] + ["frozen"] * self.frozen
        return f"MultiHeadAttention({', '.join(shown)})"


def _parameter_property(name):
    return property(lambda layer: layer._get_parameter(name),
                    lambda layer, array: layer._set_parameter(name, array),
                    doc=f"The parameter {name}; assigning checks its shape.")


for _name in WEIGHTS + BIASES:
    setattr(MultiHeadAttention, _name, _parameter_property(_name))


def _size(value, name, default=None):
    if value is None and default is not None:
        return default
    if isinstance(value, bool):
        raise TypeError(f"{name}: got a bool, wanted an int")
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {type(value).__name__}, wanted an int") from None
    if size < 1:
        raise ValueError(f"{name}: got {size}, wanted at least 1")
    return size


def _probability(dropout):
    if isinstance(dropout, (str, bytes)) or not np.isscalar(dropout):
        raise TypeError(f"dropout: got {type(dropout).__name__}, wanted a number in [0, 1)")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: got {dropout}, wanted a number in [0, 1)")
    return float(dropout)


def _layer_dtype(dtype):
    dtype = np.dtype(dtype)
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"dtype: got {dtype}, wanted float32 or float64")
    return dtype.newbyteorder("=")


def _check_dimensions(array, name):
    if array is not None and np.ndim(array) not in (2, 4):
        raise ValueError(
            f"{name}: got {np.ndim(array)} dimensions, wanted 2 (query_len, key_len) or 4"
            f" (batch, heads, query_len, key_len); for one per batch item write {name}[:, None]")

"""GroupQueryAttention of mha.compat.onnx.microsoft against ONNX Runtime's, over random nodes.

The operator leaves rows of padding open, in its outputs and in its caches: they are not compared,
nor are scores that a query does not see, which are 0 in ONNX Runtime and -inf here. What its CPU
provider refuses is compared with loops in float64 by tests/compat/test_compat_onnx_group_query.py.
"""

import numpy as np
import pytest
from onnx_nodes import (
    BFLOAT16,
    COUNT_OF_NODES,
    MICROSOFT,
    assert_same,
    by_ours,
    by_runtime,
    in_float32,
)

from mha.compat.onnx import microsoft

KINDS = ["prompt", "prompt in buffer", "step", "step in buffer", "chunk", "chunk in buffer",
         "padded chunks", "shared keys", "window cache"]
HALVES = (np.dtype(np.float16), BFLOAT16)


class Case:
    """One node, determined by the seed alone, and which rows its outputs have."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.dtype = np.dtype(np.float32)
        if self.chance(0.3):
            self.dtype = HALVES[int(self.chance(0.5))]
        self.kv_heads, self.group, self.batch = (int(n) for n in self.rng.integers(1, 4, 3))
        self.heads = self.kv_heads * self.group
        self.has_rotary = self.dtype == np.float32 and self.chance(0.5)  # keys are rounded once
        self.size = 16 * int(self.rng.integers(1, 3)) if self.has_rotary else 8 * int(
            self.rng.integers(1, 5))
        self.attributes = {"num_heads": self.heads, "kv_num_heads": self.kv_heads}
        self.choose_rows()
        self.choose_attributes()
        self.inputs = [*self.choose_heads(), *self.choose_past(),
                       (self.total_lens - 1).astype(np.int32), np.int32([self.total_len]),
                       *self.choose_rotary(), self.choose_bias(), self.choose_sink(),
                       None, None, None, None, self.query_seqlens]
        self.outputs = ["output", "present_key", "present_value"]
        if "qk_output" in self.attributes:
            self.outputs.append("output_qk")

    def chance(self, probability):
        return bool(self.rng.random() < probability)

    def some(self, low, high, size=None):
        found = self.rng.integers(low, high, size)
        return int(found) if size is None else found

    def normal(self, *shape):
        return self.rng.normal(size=shape).astype(self.dtype)

    def choose_rows(self):
        """query_len, past_len (rows of the past) or None, total_len; of each sequence total_lens
        and query_lens."""
        kind, batch = self.kind, self.batch
        self.query_seqlens = None
        self.query_len = 1 if kind.startswith("step") else self.some(2, 12)
        self.past_len = None if kind == "prompt" else self.some(1, 12)
        if kind in ("chunk", "chunk in buffer"):
            batch = self.batch = 1  # as ONNX Runtime wants it
        self.total_len = self.query_len + (0 if kind.startswith("prompt") else self.past_len)
        if kind in ("prompt in buffer", "step in buffer", "chunk in buffer"):
            self.past_len = self.total_len + self.some(0, 4)
        if kind.startswith(("prompt", "step")):
            self.total_lens = self.some(1, self.total_len + 1, batch)
        elif kind.startswith("chunk"):
            self.total_lens = np.array([self.total_len])
        elif kind == "padded chunks":
            self.past_len = self.some(0, 12) + self.query_len
            before = self.some(0, self.past_len - self.query_len + 1, batch)
            lens = np.maximum(self.some(0, self.query_len + 1, batch), before == 0)
            self.total_lens, self.query_seqlens = before + lens, lens.astype(np.int32)
            self.total_len = max(self.total_lens.max(), self.query_len) + self.some(0, 3)
        elif kind == "shared keys":
            self.batch = batch = self.batch if self.chance(0.5) else 1
            self.query_len = 1 if batch > 1 else self.query_len
            self.past_len = self.total_len = self.query_len + self.some(0, 9)
            self.total_lens = np.full(batch, self.total_len)
        else:
            self.choose_window_rows()
        most = np.minimum(self.query_len, self.total_lens)
        self.query_lens = most if self.query_seqlens is None else self.query_seqlens

    def choose_window_rows(self):
        window = self.attributes["local_window_size"] = self.some(1, 6)
        self.past_len = window + self.some(0, 5)
        self.attributes["sliding_window_cache"] = 1
        if self.chance(0.5):
            self.query_len = 1
        elif self.chance(0.5):
            self.batch = 1
        else:
            self.query_seqlens = self.some(1, self.query_len + 1, self.batch).astype(np.int32)
        self.total_lens = self.some(self.query_len, 30, self.batch)
        self.total_len = int(self.total_lens.max())
        if self.total_len == self.query_len:  # a first prompt: all of it is new
            self.total_lens[:] = self.total_len

    def choose_attributes(self):
        attributes = self.attributes
        if self.chance(0.4):
            attributes["scale"] = float(np.float32(self.rng.uniform(0.05, 0.8)))
        if self.chance(0.3):
            attributes["softcap"] = float(np.float32(self.rng.uniform(0.5, 3)))
        if self.chance(0.3):
            attributes["smooth_softmax"] = self.some(-1, 2)
        if "sliding_window_cache" in attributes:
            return
        if self.chance(0.4):
            attributes["local_window_size"] = self.some(1, 12)
        elif self.query_seqlens is None and self.chance(0.3):
            attributes["causal"] = 0
        if self.chance(0.3):
            attributes["qk_output"] = self.some(1, 3)

    def choose_heads(self):
        if self.kind != "shared keys" and self.chance(0.3):
            return [self.normal(self.batch, self.query_len,
                                (self.heads + 2 * self.kv_heads) * self.size), None, None]
        key_len = 0 if self.kind == "shared keys" else self.query_len
        return [self.normal(self.batch, self.query_len, self.heads * self.size),
                *(self.normal(self.batch, key_len, self.kv_heads * self.size) for _ in "kv")]

    def choose_past(self):
        if self.past_len is None:
            return None, None
        shape = self.batch, self.kv_heads, self.past_len, self.size
        return self.normal(*shape), self.normal(*shape)

    def choose_rotary(self):
        if not self.has_rotary:
            return None, None, None
        self.attributes |= {"do_rotary": 1, "rotary_interleaved": int(self.chance(0.5))}
        positions = None
        rows = self.total_len + self.some(0, 5)
        if self.chance(0.5):
            rows += 30
            positions = self.some(0, 20, (self.batch, self.query_len)).astype(np.int64)
        columns = 8 * self.some(1, self.size // 16 + 1)
        return self.normal(rows, columns), self.normal(rows, columns), positions

    def choose_bias(self):
        if self.chance(0.6):
            return None
        shape = [1 if self.chance(0.4) else size for size in (self.batch, self.heads)]
        bias = self.normal(*shape, self.query_len, self.total_len)
        if self.chance(0.5):  # left padding
            before = self.total_lens.min() - self.query_lens.max()
            bias[..., :self.some(0, max(before, 0) + 1)] = -np.inf
        return bias

    def choose_sink(self):
        return self.normal(self.heads) if self.chance(0.3) else None

    def kept(self):
        """How many rows each sequence's cache has."""
        if "sliding_window_cache" not in self.attributes:
            return self.total_lens
        kept = self.total_lens.copy()
        step = self.past_len - self.attributes["local_window_size"] + 1
        while (kept > self.past_len).any():
            kept -= step * (kept > self.past_len)
        return kept

    def compared(self, name, array):
        """The array without what is left open."""
        is_real = np.arange(self.query_len) < self.query_lens[:, None]
        if name == "output":
            return array[is_real]
        if name == "output_qk":
            return array.swapaxes(1, 2)[is_real]
        is_kept = np.arange(array.shape[2]) < self.kept()[:, None]
        return array.swapaxes(1, 2)[is_kept]


@pytest.mark.parametrize("seed", range(COUNT_OF_NODES))
def test_group_query_attention_is_onnx_runtimes(seed):
    case = Case(seed)
    ours = by_ours(MICROSOFT, "GroupQueryAttention", case.inputs, case.outputs, case.attributes, 23)
    theirs = by_runtime(MICROSOFT, "GroupQueryAttention", in_float32(case.inputs), case.outputs,
                        case.attributes, 23)
    for name, our_output, their_output in zip(case.outputs, ours, theirs, strict=True):
        assert our_output.shape == their_output.shape, name
        our_output, their_output = (case.compared(name, array)
                                    for array in (our_output, their_output))
        if name == "output_qk":
            their_output = np.where(our_output == -np.inf, -np.inf, their_output)
        assert_same(our_output, their_output, case.dtype)


def test_cases_cover_every_feature():
    """A generator that stopped making a kind of case would let every comparison pass."""
    cases = [Case(seed) for seed in range(300)]
    for index in (1, 3, 7, 9, 10, 11):  # key, past_key, cos_cache, position_ids, bias, sink
        count = sum(case.inputs[index] is not None for case in cases)
        assert 40 < count < 290, index
    assert sum(case.query_seqlens is not None for case in cases) > 30
    for name in ("scale", "softcap", "local_window_size", "qk_output", "do_rotary"):
        assert sum(name in case.attributes for case in cases) > 40, name
    for name, value in (("causal", 0), ("smooth_softmax", 1), ("sliding_window_cache", 1),
                        ("rotary_interleaved", 1)):
        assert sum(case.attributes.get(name) == value for case in cases) > 20, name
    assert sum((case.total_lens < case.total_len).any() for case in cases) > 60  # of unlike lengths
    evicted = [case for case in cases if (case.kept() < case.total_lens).any()]
    assert len(evicted) > 20
    assert {case.dtype for case in cases} == {np.dtype(np.float32), *HALVES}


def new_rows(batch=2, length=3, size=16, heads=2):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(batch, length, heads * size))
    return [array.astype(np.float32) for array in (query, *rng.normal(size=(2, batch, length,
                                                                            size)))]


@pytest.mark.parametrize(("change", "words"), [
    ("head size", "multiple of 8"), ("chunks of a batch", "batch_size must be 1"),
    ("norm", "q_norm_weight"), ("quantised", "quant"), ("window of no causal", "causal"),
])
def test_what_the_cpu_provider_refuses(change, words):
    """Quantised caches and windows without causal are refused here, too."""
    inputs = [*new_rows(), None, None, np.int32([2, 2]), np.int32([3]), *[None] * 10]
    attributes = {"num_heads": 2, "kv_num_heads": 1}
    if change == "head size":
        inputs[:3] = new_rows(size=7)
    elif change == "chunks of a batch":
        inputs[3:7] = np.ones((2, 1, 4, 16), np.float32), np.ones((2, 1, 4, 16), np.float32), (
            np.int32([6, 6])), np.int32([7])
    elif change == "norm":
        inputs[14:16] = np.ones((2, 16), np.float32)
    elif change == "quantised":
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    else:
        attributes |= {"causal": 0, "local_window_size": 2}
    node = MICROSOFT, "GroupQueryAttention", inputs, [
        "output", "present_key", "present_value"], attributes, 23
    with pytest.raises(Exception, match=words):
        by_runtime(*node)
    if change == "quantised":
        with pytest.raises(NotImplementedError, match="k_quant_type"):
            microsoft.group_query_attention(*inputs, **attributes)
    elif change == "window of no causal":
        with pytest.raises(ValueError, match="local_window_size"):
            microsoft.group_query_attention(*inputs, **attributes)
    else:
        by_ours(*node)


def test_a_window_of_nothing_is_refused_here_alone():
    """In ONNX Runtime its queries see nothing."""
    inputs = [*new_rows(), None, None, np.int32([2, 2]), np.int32([3])]
    attributes = {"num_heads": 2, "kv_num_heads": 1, "local_window_size": 0}
    assert not by_runtime(MICROSOFT, "GroupQueryAttention", inputs, ["output"], attributes,
                          23)[0].any()
    with pytest.raises(ValueError, match="local_window_size: got 0"):
        microsoft.group_query_attention(*inputs, **attributes)

"""Mistakes that teachers know, in masks, flags and lengths: each beside right code like it."""

from learners_attention import Mistake

MASK = '''
def attention(query, key, value, mask=None):
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    weights = softmax(scores)
    return weights @ value, weights
'''
FILL = "scores = np.where(mask == 0, -1e9, scores)"
SOFTMAX = "weights = softmax(scores)\n"

CAUSAL = '''
def attention(query, key, value, causal=False):
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
    if causal:
        visible = np.tri(*scores.shape[-2:], k=scores.shape[-1] - scores.shape[-2])
        scores = np.where(visible, scores, -np.inf)
    return softmax(scores) @ value
'''
VISIBLE = "visible = np.tri(*scores.shape[-2:], k=scores.shape[-1] - scores.shape[-2])"

SQUARE = '''
def attention(q, k, v, is_causal=False):
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if is_causal:
        n = q.shape[-2]
        s = s + np.triu(np.full((n, n), -1e9), k=1)
    return softmax(s) @ v
'''

LENGTHS = '''
def attention(queries, keys, values, valid_lens=None):
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1])
    if valid_lens is not None:
        valid_lens = np.asarray(valid_lens)
        positions = np.arange(keys.shape[1])[None, None, :]
        visible = positions < valid_lens[:, None, None]
        scores = np.where(visible, scores, -1e6)
    return softmax(scores) @ values
'''
BEFORE = "visible = positions < valid_lens[:, None, None]"

D2L = '''
class Layer:
    def __init__(self, num_hiddens, num_heads):
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = np.random.randn(4, num_hiddens, num_hiddens)

    def split(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).transpose(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])

    def forward(self, queries, keys, values, valid_lens=None):
        q, k, v = (self.split(x @ w) for x, w in
                   ((queries, self.W_q), (keys, self.W_k), (values, self.W_v)))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        if valid_lens is not None:
            lens = np.repeat(valid_lens, self.num_heads)
            scores = np.where(np.arange(k.shape[1]) < lens[:, None, None], scores, -1e6)
        out = (softmax(scores) @ v).reshape(len(queries), self.num_heads, queries.shape[1], -1)
        return out.transpose(0, 2, 1, 3).reshape(*queries.shape) @ self.W_o
'''

PADDING = '''
class Layer:
    def __init__(self, embed_dim, num_heads):
        self.num_heads = num_heads
        self.in_proj_weight = np.random.randn(3 * embed_dim, embed_dim)
        self.in_proj_bias = np.zeros(3 * embed_dim)
        self.out_proj_weight = np.random.randn(embed_dim, embed_dim)
        self.out_proj_bias = np.zeros(embed_dim)

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None, is_causal=False):
        weights = np.split(self.in_proj_weight, 3)
        biases = np.split(self.in_proj_bias, 3)
        q, k, v = (x @ w.T + b for x, w, b in zip((query, key, value), weights, biases))
        q, k, v = (x.reshape(*x.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)
                   for x in (q, k, v))
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
        blocked = np.zeros(scores.shape, bool)
        if key_padding_mask is not None:
            blocked |= key_padding_mask[:, None, None, :].astype(bool)
        if attn_mask is not None:
            blocked |= attn_mask.astype(bool)
        if is_causal:
            blocked |= np.triu(np.ones(scores.shape[-2:], bool), 1 + k.shape[2] - q.shape[2])
        scores = np.where(blocked, -np.inf, scores)
        out = softmax(scores) @ v
        out = out.transpose(0, 2, 1, 3).reshape(*query.shape)
        return out @ self.out_proj_weight.T + self.out_proj_bias
'''

TENSORFLOW = '''
def scaled_dot_product_attention(q, k, v, mask):
    logits = np.matmul(q, np.swapaxes(k, -1, -2)) / np.sqrt(k.shape[-1])
    if mask is not None:
        logits += (mask * -1e9)
    weights = softmax(logits)
    return np.matmul(weights, v), weights
attention = scaled_dot_product_attention
'''

OPTIONS = '''
def attention(query, key, value, bias=None, scale=None, temperature=1.0):
    scale = 1 / np.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * scale
    scores = scores / temperature
    if bias is not None:
        scores = scores + bias
    return softmax(scores) @ value
'''

MISTAKES = [
    # A mask.
    Mistake("the mask is ignored", MASK, FILL, "np.where(mask == 0, -1e9, scores)",
            "scores[...] = np.where(mask == 0, -1e9, scores)"),
    Mistake("the mask is applied after the softmax", MASK, FILL + "\n    " + SOFTMAX,
            "pass\n    weights = softmax(scores) * (1 if mask is None else mask)\n",
            "scores = scores + np.log(np.maximum(mask, 1e-300))\n    weights = softmax(scores)\n"),
    Mistake("the mask is added after the softmax", MASK, FILL + "\n    " + SOFTMAX,
            "pass\n    weights = softmax(scores)\n    if mask is not None:\n"
            "        weights = weights + (1 - mask) * -1e9\n"),
    Mistake("added after the softmax (or fills the weights", MASK, FILL + "\n    " + SOFTMAX,
            "pass\n    weights = softmax(scores)\n    if mask is not None:\n"
            "        weights = np.where(mask, weights, -1e9)\n",
            "pass\n    weights = softmax(scores)\n    if mask is not None:\n"
            "        weights = weights * mask\n"
            "        weights = weights / weights.sum(axis=-1, keepdims=True)\n"),
    Mistake("blocked scores become 0", MASK, FILL, "scores = scores * mask",
            "scores = scores + (1 - mask) * -1e9"),
    Mistake("blocked scores become 0", MASK, FILL, "scores = np.where(mask == 0, 1e-9, scores)",
            "scores = np.where(mask == 0, -1e+9, scores)"),
    Mistake("-1e9 is meant", MASK, FILL, "scores = scores + (1 - mask) * -1e-9",
            "scores = scores + (1 - mask) * -1e9"),
    Mistake("blocked scores become -5", MASK, FILL, "scores = np.where(mask == 0, -5, scores)",
            "scores = np.where(mask == 0, -5e5, scores)"),
    Mistake("-3 is added to blocked scores", MASK, FILL, "scores = scores - 3.0 * (mask == 0)",
            "scores = scores - 3e9 * (mask == 0)"),
    Mistake("still get some weight", MASK, FILL, "scores = np.where(mask == 0, -20, scores)",
            "scores = np.where(mask == 0, np.finfo(np.float32).min, scores)"),
    Mistake("wrong sign", MASK, FILL, "scores = np.where(mask == 0, 1e9, scores)",
            "scores = np.where(mask == 0, -1e9, scores)"),
    Mistake("0 and 1 are added to the scores", MASK, FILL, "scores = scores + (mask != 0)",
            "scores = scores + np.where(mask, 0, -np.inf)"),
    Mistake("0 and 1 are subtracted", MASK, FILL, "scores = scores - (mask != 0)",
            "scores = scores - 1e9 * (1 - mask)"),
    Mistake("multiplied by -1e9", MASK, FILL,
            "scores = np.where(mask == 0, scores * -1e9, scores)"),
    Mistake("only the first row", MASK, FILL,
            "scores = np.where(mask[..., :1, :] == 0, -1e9, scores)",
            "scores = np.where(mask[..., :, :] == 0, -1e9, scores)"),
    Mistake("is transposed", MASK, FILL,
            "scores = np.where(np.swapaxes(mask, -1, -2) == 0, -1e9, scores)"),
    Mistake("changes its argument mask", MASK, FILL, FILL + "\n        mask *= 0",
            FILL + "\n        mask = mask * 0"),
    Mistake("first item's mask", MASK, FILL,
            "scores = np.where((mask if mask.ndim == 2 else mask[:1]) == 0, -1e9, scores)",
            "scores = np.where((mask if mask.ndim == 2 else mask[:]) == 0, -1e9, scores)"),
    Mistake("only then: forgot to divide", MASK, FILL,
            "scores = np.where(mask == 0, -1e9, query @ np.swapaxes(key, -1, -2))"),
    Mistake("NaN in other rows", MASK, SOFTMAX,
            "weights = softmax(scores)\n    if mask is not None and not np.all(mask.any(-1)):\n"
            "        weights = weights * np.nan\n",
            "weights = softmax(scores)\n    if mask is not None and np.all(~mask.any(-1)):\n"
            "        weights = weights * np.nan\n"),
    # A flag.
    Mistake("does not see its own key", CAUSAL, "k=scores.shape[-1] - scores.shape[-2]",
            "k=-1", "k=0"),
    Mistake("the next key, one of the future", CAUSAL, "k=scores.shape[-1] - scores.shape[-2]",
            "k=1"),
    Mistake("upper triangle", CAUSAL, VISIBLE, "visible = np.triu(np.ones(scores.shape[-2:]))",
            "visible = 1 - np.triu(np.ones(scores.shape[-2:]), 1)"),
    Mistake("causal is ignored", CAUSAL, "if causal:", "if causal is None:", "if causal is True:"),
    Mistake("whatever causal says", CAUSAL, "if causal:", "if not None:",
            "if bool(causal):"),
    Mistake("blocked scores become 0", CAUSAL, "np.where(visible, scores, -np.inf)",
            "scores * visible", "np.where(visible, scores, np.log(0))"),
    Mistake("still get some weight", CAUSAL, "-np.inf)", "-30.0)", "-30.0e30)"),
    Mistake("see its own key", SQUARE, "k=1", "k=0", "k=+1"),
    Mistake("one of the future", SQUARE, "k=1", "k=2", "k=True"),
    Mistake("upside down", SQUARE, "np.triu(np.full((n, n), -1e9), k=1)",
            "np.tril(np.full((n, n), -1e9), k=-1)", "np.tril(np.full((n, n), -1e9), k=-1).T"),
    Mistake("the mask is added after the softmax", SQUARE,
            "return softmax(s) @ v", "return (softmax(q @ np.swapaxes(k, -1, -2) / "
            "np.sqrt(q.shape[-1])) + s * 0 + (s < -1e8) * -1e9) @ v"),
    # Lengths.
    Mistake("<= lets one padded key in", LENGTHS, BEFORE,
            "visible = positions <= valid_lens[:, None, None]",
            "visible = positions <= valid_lens[:, None, None] - 1"),
    Mistake("last valid key is blocked", LENGTHS, BEFORE,
            "visible = positions < valid_lens[:, None, None] - 1",
            "visible = positions + 1 <= valid_lens[:, None, None]"),
    Mistake("wrong sign", LENGTHS, BEFORE, "visible = positions >= valid_lens[:, None, None]",
            "visible = valid_lens[:, None, None] > positions"),
    Mistake("is used for the queries", LENGTHS,
            "positions = np.arange(keys.shape[1])[None, None, :]",
            "positions = np.arange(queries.shape[1])[None, :, None]",
            "positions = np.arange(values.shape[1])[None, None, :]"),
    Mistake("blanks queries, too", LENGTHS, BEFORE,
            "visible = (positions < valid_lens[:, None, None])"
            " & (np.arange(queries.shape[1])[:, None] < valid_lens[:, None, None])"),
    Mistake("first item's length", LENGTHS, BEFORE, "visible = positions < valid_lens[0]",
            "visible = positions < valid_lens.reshape(-1, 1, 1)"),
    Mistake("or the largest", LENGTHS, BEFORE, "visible = positions < max(valid_lens)"),
    Mistake("valid_lens is ignored", LENGTHS, "scores = np.where(visible, scores, -1e6)",
            "np.where(visible, scores, -1e6)", "scores[~(visible | (scores != scores))] = -1e6"),
    Mistake("blocked scores become 0", LENGTHS, "-1e6", "1e-6", "-1.0e6"),
    Mistake("after the softmax", LENGTHS, "scores = np.where(visible, scores, -1e6)\n"
            "    return softmax(scores)", "return np.where(visible, softmax(scores), 0) @ values\n"
            "    return softmax(scores)"),
    Mistake("tiled over heads", D2L, "np.repeat(valid_lens, self.num_heads)",
            "np.tile(valid_lens, self.num_heads)",
            "np.repeat(valid_lens, self.num_heads, axis=0)"),
    Mistake("<= lets one padded key in", D2L, "np.arange(k.shape[1]) <", "np.arange(k.shape[1]) <=",
            "-1 + np.arange(1, k.shape[1] + 1) <"),
    # PyTorch's options.
    Mistake("key_padding_mask is ignored", PADDING, "if key_padding_mask is not None:",
            "if key_padding_mask is False:"),
    Mistake("is used for the queries", PADDING, "key_padding_mask[:, None, None, :]",
            "key_padding_mask[:, None, :q.shape[2], None]"),
    Mistake("attn_mask is ignored", PADDING, "blocked |= attn_mask.astype(bool)", "pass"),
    Mistake("is_causal: the mask is off by one", PADDING, "1 + k.shape[2] - q.shape[2]",
            "k.shape[2] - q.shape[2]", "k.shape[2] - q.shape[2] + 1"),
    Mistake("reshaped without the transpose when merging", PADDING,
            "out = out.transpose(0, 2, 1, 3).reshape", "out = out.reshape"),
    # A mask without default.
    Mistake("forgot to divide", TENSORFLOW, " / np.sqrt(k.shape[-1])", "", " * k.shape[-1] ** -.5"),
    Mistake("blocked scores become 0", TENSORFLOW, "logits += (mask * -1e9)",
            "logits = np.where(mask, 0, logits)", "logits += -(mask * 1e9)"),
    # Numbers.
    Mistake("bias is ignored", OPTIONS, "scores = scores + bias", "scores + bias",
            "scores = bias + scores"),
    Mistake("bias is added after the softmax", OPTIONS, "scores = scores + bias\n",
            "return (softmax(scores) + bias) @ value\n"),
    Mistake("bias is added before", OPTIONS, "scores = scores + bias",
            "scores = scores + bias * scale", "scores = scores + bias * 1"),
    Mistake("scale is ignored", OPTIONS, "* scale\n", "/ np.sqrt(query.shape[-1])\n",
            "/ (1 / scale)\n"),
    Mistake("temperature is ignored", OPTIONS, "scores = scores / temperature", "pass",
            "scores = scores / (1.0 * temperature)"),
]

"""Mistakes that teachers know, in layers: each beside right code that looks like it."""

from learners_attention import Mistake

LAYER = '''
class Layer:
    def __init__(self, d_model, num_heads):
        self.d_model, self.num_heads, self.d_k = d_model, num_heads, d_model // num_heads
        self.W_q = np.random.randn(d_model, d_model) * 0.1
        self.W_k = np.random.randn(d_model, d_model) * 0.1
        self.W_v = np.random.randn(d_model, d_model) * 0.1
        self.W_o = np.random.randn(d_model, d_model) * 0.1
        self.b_o = np.zeros(d_model)

    def split_heads(self, x):
        batch, length, _ = x.shape
        x = x.reshape(batch, length, self.num_heads, self.d_k)
        return x.transpose(0, 2, 1, 3)

    def merge_heads(self, x):
        batch, heads, length, d_k = x.shape
        x = x.transpose(0, 2, 1, 3)
        return x.reshape(batch, length, heads * d_k)

    def forward(self, query, key, value):
        Q = self.split_heads(query @ self.W_q)
        K = self.split_heads(key @ self.W_k)
        V = self.split_heads(value @ self.W_v)
        scores = Q @ K.transpose(0, 1, 3, 2) / np.sqrt(self.d_k)
        weights = softmax(scores)
        attended = weights @ V
        return self.merge_heads(attended) @ self.W_o + self.b_o
'''
SPLIT = ("x = x.reshape(batch, length, self.num_heads, self.d_k)\n"
         "        return x.transpose(0, 2, 1, 3)")
MERGE = "x = x.transpose(0, 2, 1, 3)\n        return x.reshape(batch, length, heads * d_k)"
FINISH = "return self.merge_heads(attended) @ self.W_o + self.b_o"
SCORES = "scores = Q @ K.transpose(0, 1, 3, 2) / np.sqrt(self.d_k)"

LINEARS = '''
class Linear:
    def __init__(self, inputs, outputs):
        self.weight = np.random.randn(outputs, inputs) * 0.1
        self.bias = np.zeros(outputs)

    def __call__(self, x):
        return x @ self.weight.T + self.bias

class Layer:
    def __init__(self, embed_dim, n_heads):
        self.n_heads, self.head_dim = n_heads, embed_dim // n_heads
        self.q_proj, self.k_proj = Linear(embed_dim, embed_dim), Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = Linear(embed_dim, embed_dim), Linear(embed_dim, embed_dim)

    def split(self, x):
        return x.reshape(len(x), -1, self.n_heads, self.head_dim).swapaxes(1, 2)

    def __call__(self, query, key, value):
        q = self.split(self.q_proj(query))
        k = self.split(self.k_proj(key))
        v = self.split(self.v_proj(value))
        w = softmax(q @ k.swapaxes(-1, -2) / self.head_dim ** 0.5)
        out = (w @ v).swapaxes(1, 2).reshape(*query.shape)
        return self.out_proj(out), w
'''

GPT = '''
class CausalSelfAttention:
    def __init__(self, config):
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.c_attn = np.random.randn(config.n_embd, 3 * config.n_embd) * 0.02
        self.c_proj = np.random.randn(config.n_embd, config.n_embd) * 0.02
        self.bias = np.tril(np.ones((config.block_size, config.block_size)))[None, None]

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = np.split(x @ self.c_attn, 3, axis=-1)
        k = k.reshape(B, T, self.n_head, C // self.n_head).transpose(0, 2, 1, 3)
        q = q.reshape(B, T, self.n_head, C // self.n_head).transpose(0, 2, 1, 3)
        v = v.reshape(B, T, self.n_head, C // self.n_head).transpose(0, 2, 1, 3)
        att = (q @ k.transpose(0, 1, 3, 2)) * (1.0 / np.sqrt(k.shape[-1]))
        att = np.where(self.bias[:, :, :T, :T] == 0, -np.inf, att)
        y = softmax(att) @ v
        y = y.transpose(0, 2, 1, 3).reshape(B, T, C)
        return y @ self.c_proj
Layer = CausalSelfAttention
'''

PER_HEAD = '''
class Head:
    def __init__(self, d_model, d_k):
        self.query = np.random.randn(d_model, d_k)
        self.key = np.random.randn(d_model, d_k)
        self.value = np.random.randn(d_model, d_k)

    def __call__(self, x):
        q, k, v = x @ self.query, x @ self.key, x @ self.value
        return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-1])) @ v

class Layer:
    def __init__(self, d_model, num_heads):
        self.heads = [Head(d_model, d_model // num_heads) for _ in range(num_heads)]
        self.proj = np.random.randn(d_model, d_model)

    def __call__(self, x):
        out = np.concatenate([head(x) for head in self.heads], axis=-1)
        return out @ self.proj
'''

FUNCTION = '''
def multi_head_attention(x, W_q, W_k, W_v, W_o, num_heads):
    seq_len, d_model = x.shape
    d_k = d_model // num_heads
    Q = x @ W_q
    K = x @ W_k
    V = x @ W_v
    heads = []
    for h in range(num_heads):
        columns = slice(h * d_k, (h + 1) * d_k)
        q, k, v = Q[:, columns], K[:, columns], V[:, columns]
        heads.append(softmax(q @ k.T / np.sqrt(d_k)) @ v)
    return np.concatenate(heads, axis=-1) @ W_o
Layer = multi_head_attention
'''

GROUPED = '''
class Layer:
    def __init__(self, d_model, num_heads, num_kv_heads):
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = d_model // num_heads
        self.wq = np.random.randn(d_model, num_heads * self.head_dim)
        self.wk = np.random.randn(d_model, num_kv_heads * self.head_dim)
        self.wv = np.random.randn(d_model, num_kv_heads * self.head_dim)
        self.wo = np.random.randn(num_heads * self.head_dim, d_model)

    def __call__(self, x):
        b, t, _ = x.shape
        q = (x @ self.wq).reshape(b, t, self.num_heads, self.head_dim).transpose(0, 2, 1, 3)
        k = (x @ self.wk).reshape(b, t, self.num_kv_heads, self.head_dim).transpose(0, 2, 1, 3)
        v = (x @ self.wv).reshape(b, t, self.num_kv_heads, self.head_dim).transpose(0, 2, 1, 3)
        n = self.num_heads // self.num_kv_heads
        k, v = np.repeat(k, n, axis=1), np.repeat(v, n, axis=1)
        out = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(self.head_dim)) @ v
        return out.transpose(0, 2, 1, 3).reshape(b, t, -1) @ self.wo
'''

MISTAKES = [
    # Splitting and merging.
    Mistake("reshaped without the transpose", LAYER, SPLIT,
            "return x.reshape(batch, self.num_heads, length, self.d_k)",
            "return np.stack(np.split(x, self.num_heads, axis=-1), axis=1)"),
    Mistake("heads interleaved", LAYER, SPLIT,
            "return x.reshape(batch, length, self.d_k, self.num_heads).transpose(0, 3, 1, 2)",
            "return x.reshape(batch, length, self.num_heads, self.d_k).swapaxes(2, 1)"),
    Mistake("never split into heads", LAYER, SPLIT, "return x[:, None]"),
    Mistake("split over the batch", LAYER, SPLIT,
            "return x.reshape(self.num_heads, batch, length, self.d_k).swapaxes(0, 1)"),
    Mistake("first head's columns", LAYER, SPLIT,
            "return np.stack([x[..., :self.d_k] for h in range(self.num_heads)], axis=1)",
            "return np.stack([x[..., h * self.d_k:(h + 1) * self.d_k] for h in "
            "range(self.num_heads)], axis=1)"),
    Mistake("without the transpose when merging", LAYER, MERGE,
            "return x.reshape(batch, length, heads * d_k)",
            "return x.swapaxes(1, 2).reshape(batch, length, heads * d_k)"),
    Mistake("interleaved when merging", LAYER, MERGE,
            "return x.transpose(0, 2, 3, 1).reshape(batch, length, heads * d_k)"),
    Mistake("heads concatenated in reverse", LAYER, MERGE,
            "return np.concatenate([x[:, h] for h in reversed(range(heads))], axis=-1)",
            "return np.concatenate([x[:, h] for h in range(heads)], axis=-1)"),
    Mistake("the sum of the heads is repeated", LAYER, MERGE,
            "return np.tile(x.sum(axis=1), (1, 1, heads))"),
    Mistake("along the sequence", LAYER, FINISH,
            "return np.concatenate([attended[:, h] for h in range(self.num_heads)], axis=1)"),
    Mistake("heads are not merged", LAYER, FINISH, "return attended"),
    Mistake("heads summed", LAYER, FINISH, "return attended.sum(axis=1)"),
    Mistake("heads averaged", LAYER, FINISH, "return attended.mean(axis=1)"),
    Mistake("only the first head is used", LAYER, FINISH, "return attended[:, 0]"),
    Mistake("key are reshaped without the transpose", LAYER,
            "K = self.split_heads(key @ self.W_k)",
            "K = (key @ self.W_k).reshape(len(key), self.num_heads, -1, self.d_k)",
            "K = (key @ self.W_k).reshape(len(key), -1, self.num_heads, self.d_k).swapaxes(1, 2)"),
    # Projections.
    Mistake("forgot the output projection", LAYER, FINISH, "return self.merge_heads(attended)",
            "return self.merge_heads(attended).dot(self.W_o) + self.b_o"),
    Mistake("b_o is not added", LAYER, FINISH, "return self.merge_heads(attended) @ self.W_o",
            "return self.b_o + self.merge_heads(attended) @ self.W_o"),
    Mistake("W_o is transposed", LAYER, FINISH,
            "return self.merge_heads(attended) @ self.W_o.T + self.b_o",
            "return (self.W_o.T @ self.merge_heads(attended).swapaxes(1, 2)).swapaxes(1, 2)"
            " + self.b_o"),
    Mistake("W_k is transposed", LAYER, "key @ self.W_k", "key @ self.W_k.T",
            "(self.W_k.T @ key.swapaxes(1, 2)).swapaxes(1, 2)"),
    Mistake("keys are projected with W_q", LAYER, "key @ self.W_k", "key @ self.W_q"),
    Mistake("values are projected with W_k", LAYER, "value @ self.W_v", "value @ self.W_k"),
    Mistake("values are not projected", LAYER, "value @ self.W_v", "value",
            "np.einsum('bld,de->ble', value, self.W_v)"),
    Mistake("key and value are swapped: W_v makes the keys", LAYER,
            "K = self.split_heads(key @ self.W_k)\n        V = self.split_heads(value @ self.W_v)",
            "K = self.split_heads(key @ self.W_v)\n        V = self.split_heads(value @ self.W_k)",
            "V = self.split_heads(value @ self.W_v)\n        K = self.split_heads(key @ self.W_k)"),
    Mistake("keys are made from the query", LAYER, "key @ self.W_k", "query @ self.W_k"),
    Mistake("values are made from the query", LAYER, "value @ self.W_v", "query @ self.W_v"),
    Mistake("values are made from the key", LAYER, "value @ self.W_v", "key @ self.W_v"),
    Mistake("keys and values are made from the query", LAYER,
            "def forward(self, query, key, value):",
            "def forward(self, query, key, value):\n        key = value = query",
            "def forward(self, query, key, value):\n        key = 1 * key"),
    Mistake("key and value are swapped", LAYER, "def forward(self, query, key, value):",
            "def forward(self, query, key, value):\n        key, value = value, key"),
    Mistake("W_q and W_k are the same array", LAYER,
            "self.W_k = np.random.randn(d_model, d_model) * 0.1", "self.W_k = self.W_q",
            "self.W_k = self.W_q.copy()"),
    Mistake("output is projected with W_v", LAYER, "@ self.W_o", "@ self.W_v"),
    Mistake("output projection W_o is applied twice", LAYER, "@ self.W_o + self.b_o",
            "@ self.W_o @ self.W_o + self.b_o @ self.W_o + self.b_o"),
    # Attention inside of it.
    Mistake("divided by sqrt(d_model)", LAYER, "np.sqrt(self.d_k)", "np.sqrt(self.d_model)",
            "np.sqrt(self.d_model // self.num_heads)"),
    Mistake("divided by d_model", LAYER, "np.sqrt(self.d_k)", "self.d_model"),
    Mistake("divided by sqrt(num_heads)", LAYER, "np.sqrt(self.d_k)", "np.sqrt(self.num_heads)"),
    Mistake("hard-coded scale", LAYER, "np.sqrt(self.d_k)", "8.0", "(self.d_k / self.d_k ** 0.5)"),
    Mistake("hard-coded scale", LAYER, "np.sqrt(self.d_k)", "np.sqrt(64)"),
    Mistake("over the heads instead of the keys", LAYER, "weights = softmax(scores)",
            "weights = softmax(scores, axis=1)", "weights = softmax(scores, axis=3)"),
    Mistake("over the queries instead of the keys", LAYER, "weights = softmax(scores)",
            "weights = softmax(scores, axis=2)"),
    Mistake("compare the queries with themselves", LAYER, "Q @ K.transpose(0, 1, 3, 2)",
            "Q @ Q.transpose(0, 1, 3, 2)"),
    Mistake("weights @ key", LAYER, "attended = weights @ V", "attended = weights @ K"),
    Mistake("weights, of the first head", LAYER, "attended = weights @ V",
            "attended = weights[:, :1] @ V", "attended = weights[:, :] @ V"),
    Mistake("residual connection", LAYER, FINISH,
            "return query + self.merge_heads(attended) @ self.W_o + self.b_o"),
    Mistake("layer normalisation", LAYER, FINISH,
            "y = query + self.merge_heads(attended) @ self.W_o + self.b_o\n"
            "        return (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 1e-6)"),
    Mistake("ReLU", LAYER, FINISH,
            "return np.maximum(self.merge_heads(attended) @ self.W_o + self.b_o, 0)"),
    Mistake("causal mask is always on", LAYER, SCORES,
            SCORES + "\n        scores = scores + np.triu(np.full(scores.shape[-2:], -1e9), 1)",
            SCORES + "\n        scores = scores + np.triu(np.full(scores.shape[-2:], 0.0), 1)"),
    Mistake("changes its own weights", LAYER, "Q = self",
            "self.W_q /= 1.01\n        Q = self", "W_q = self.W_q / 1.01\n        Q = self"),
    # Two at once.
    Mistake("reshaped without the transpose", LAYER, SPLIT + "\n", "return x.reshape(batch, "
            "self.num_heads, length, self.d_k)\n"),
    Mistake("heads concatenated in reverse", LAYER, FINISH,
            "return self.merge_heads(attended[:, ::-1])"),
    # Layers of linear layers.
    Mistake("keys are projected with W_q", LINEARS, "self.k_proj(key)", "self.q_proj(key)"),
    Mistake("forgot the output projection", LINEARS, "return self.out_proj(out), w",
            "return out, w", "return self.out_proj(1 * out), w"),
    Mistake("reshaped without the transpose when merging", LINEARS,
            "(w @ v).swapaxes(1, 2).reshape(*query.shape)", "(w @ v).reshape(*query.shape)"),
    Mistake("no bias is added", LINEARS, "x @ self.weight.T + self.bias", "x @ self.weight.T"),
    # A decoder's.
    Mistake("does not see its own key", GPT, "== 0, -np.inf, att)",
            "- np.eye(T) == 0, -1e9, att)", "< 1, -np.inf, att)"),
    Mistake("one of the future", GPT, "np.tril(np.ones((config.block_size, config.block_size)))",
            "np.tril(np.ones((config.block_size, config.block_size)), k=1)",
            "np.tri(config.block_size, config.block_size, 0)"),
    Mistake("upside down", GPT, "np.tril(", "np.triu(", "1 * np.tril("),
    Mistake("forgot to divide", GPT, " * (1.0 / np.sqrt(k.shape[-1]))", "",
            " / k.shape[-1] ** 0.5"),
    Mistake("over the queries", GPT, "softmax(att)", "softmax(att, -2)", "softmax(att, -1)"),
    Mistake("in another order: W_k, W_v, W_q", GPT, "q, k, v = np.split",
            "v, q, k = np.split"),
    Mistake("without the transpose when merging", GPT, "y = y.transpose(0, 2, 1, 3).reshape",
            "y = y.reshape"),
    # A list of heads.
    Mistake("heads concatenated in reverse", PER_HEAD, "for head in self.heads]",
            "for head in self.heads[::-1]]", "for head in self.heads[:]]"),
    Mistake("heads share the first head's weights", PER_HEAD,
            "[Head(d_model, d_model // num_heads) for _ in range(num_heads)]",
            "[Head(d_model, d_model // num_heads)] * num_heads"),
    Mistake("forgot to divide", PER_HEAD, " / np.sqrt(k.shape[-1])", ""),
    Mistake("first head's columns", PER_HEAD, "head(x) for head in self.heads",
            "self.heads[0](x) for head in self.heads"),
    # Functions that take the weights.
    Mistake("divided by sqrt(d_model)", FUNCTION, "np.sqrt(d_k)", "np.sqrt(d_model)"),
    Mistake("heads interleaved", FUNCTION, "slice(h * d_k, (h + 1) * d_k)",
            "slice(h, None, num_heads)", "slice(h * d_k, h * d_k + d_k)"),
    Mistake("forgot the output projection", FUNCTION, " @ W_o", ""),
    Mistake("first head", FUNCTION, "np.concatenate(heads, axis=-1)",
            "np.concatenate(heads[:1] * num_heads, axis=-1)"),
    # Grouped heads.
    Mistake("interleaved the wrong way", GROUPED,
            "k, v = np.repeat(k, n, axis=1), np.repeat(v, n, axis=1)",
            "k, v = np.tile(k, (1, n, 1, 1)), np.tile(v, (1, n, 1, 1))",
            "k, v = (np.repeat(y[:, :, None], n, 2).reshape(q.shape) for y in (k, v))"),
]

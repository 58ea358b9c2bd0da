"""Right code in the styles of books, libraries and tutorials: nothing of it may be blamed.

Each is (the words that the notes must have, source).
"""

RIGHT = [
    ("always causal", '''
class Head:  # a list of heads, each with its triangle
    def __init__(self, n_embd, head_size, block_size):
        self.key = np.random.randn(n_embd, head_size)
        self.query = np.random.randn(n_embd, head_size)
        self.value = np.random.randn(n_embd, head_size)
        self.tril = np.tril(np.ones((block_size, block_size)))
    def __call__(self, x):
        B, T, C = x.shape
        k, q = x @ self.key, x @ self.query
        wei = q @ k.transpose(0, 2, 1) * k.shape[-1] ** -0.5
        wei = np.where(self.tril[:T, :T] == 0, -np.inf, wei)
        return softmax(wei) @ (x @ self.value)
class Layer:
    def __init__(self, n_embd, n_head, block_size):
        self.heads = [Head(n_embd, n_embd // n_head, block_size) for _ in range(n_head)]
        self.proj = np.random.randn(n_embd, n_embd)
    def __call__(self, x):
        return np.concatenate([h(x) for h in self.heads], -1) @ self.proj
'''),
    ("always causal", '''
class Linear:
    def __init__(self, i, o, bias=True):
        self.weight = np.random.uniform(-1, 1, (o, i)) / i ** 0.5
        self.bias = np.zeros(o) if bias else None
    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias
class Layer:  # with a dropout and a context length
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        self.d_out, self.num_heads, self.head_dim = d_out, num_heads, d_out // num_heads
        self.W_query = Linear(d_in, d_out, qkv_bias)
        self.W_key = Linear(d_in, d_out, qkv_bias)
        self.W_value = Linear(d_in, d_out, qkv_bias)
        self.out_proj = Linear(d_out, d_out)
        self.mask = np.triu(np.ones((context_length, context_length)), 1)
    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (w(x).reshape(b, t, self.num_heads, self.head_dim).transpose(0, 2, 1, 3)
                   for w in (self.W_query, self.W_key, self.W_value))
        s = q @ k.transpose(0, 1, 3, 2)
        s = np.where(self.mask[:t, :t].astype(bool), -np.inf, s)
        w = softmax(s / k.shape[-1] ** 0.5)
        return self.out_proj((w @ v).transpose(0, 2, 1, 3).reshape(b, t, self.d_out))
'''),
    ("always causal", '''
class Conv1D:
    def __init__(self, nf, nx):
        self.weight, self.bias = np.random.randn(nx, nf) * 0.02, np.zeros(nf)
    def __call__(self, x):
        return x @ self.weight + self.bias
class GPT2Attention:
    def __init__(self, n_embd, n_head):
        self.n_head, self.split_size = n_head, n_embd
        self.c_attn, self.c_proj = Conv1D(3 * n_embd, n_embd), Conv1D(n_embd, n_embd)
    def __call__(self, x, attention_mask=None):
        q, k, v = (a.reshape(*a.shape[:2], self.n_head, -1).transpose(0, 2, 1, 3)
                   for a in np.split(self.c_attn(x), 3, axis=2))
        w = q @ k.swapaxes(-1, -2) / np.sqrt(v.shape[-1])
        n = w.shape[-1]
        w = np.where(np.tri(n, dtype=bool), w, -1e4)
        if attention_mask is not None:
            w = w + attention_mask
        a = (softmax(w) @ v).transpose(0, 2, 1, 3)
        return self.c_proj(a.reshape(*a.shape[:2], -1))
Layer = GPT2Attention
'''),
    ("", '''
def linear(x, w, b):
    return x @ w + b
def mha(x, c_attn, c_proj, n_head):  # the GPT-2 of sixty lines
    x = linear(x, **c_attn)
    qkv = np.split(x, 3, axis=-1)
    heads = [np.split(y, n_head, axis=-1) for y in qkv]
    out = [softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v for q, k, v in zip(*heads)]
    return linear(np.hstack(out), **c_proj)
def attention(x, c_attn, b_attn, c_proj, b_proj, n_head):
    return mha(x, {"w": c_attn, "b": b_attn}, {"w": c_proj, "b": b_proj}, n_head)
'''),
    ("1 blocks|1 means blocked", '''
class Layer:  # call(v, k, q, mask)
    def __init__(self, d_model, num_heads):
        self.num_heads, self.d_model, self.depth = num_heads, d_model, d_model // num_heads
        self.wq, self.wk, self.wv, self.dense = np.random.randn(4, d_model, d_model)
    def split_heads(self, x, batch_size):
        return np.transpose(np.reshape(x, (batch_size, -1, self.num_heads, self.depth)),
                            (0, 2, 1, 3))
    def call(self, v, k, q, mask):
        batch_size = q.shape[0]
        q, k, v = (self.split_heads(x @ w, batch_size)
                   for x, w in ((q, self.wq), (k, self.wk), (v, self.wv)))
        logits = np.matmul(q, np.swapaxes(k, -1, -2)) / np.sqrt(float(k.shape[-1]))
        if mask is not None:
            logits += mask * -1e9
        weights = softmax(logits)
        out = np.transpose(np.matmul(weights, v), (0, 2, 1, 3))
        return out.reshape(batch_size, -1, self.d_model) @ self.dense, weights
'''),
    ("stored (out, in)", '''
class Linear:
    def __init__(self, i, o):
        self.W, self.b = np.random.randn(o, i), np.zeros((o,))
    def forward(self, x):
        return x @ self.W.T + self.b
class Layer:  # four linear layers in a list
    def __init__(self, h, d_model, dropout=0.1):
        self.d_k, self.h = d_model // h, h
        self.linears = [Linear(d_model, d_model) for _ in range(4)]
        self.attn = None
    def forward(self, query, key, value, mask=None):
        n = query.shape[0]
        query, key, value = [l.forward(x).reshape(n, -1, self.h, self.d_k).transpose(0, 2, 1, 3)
                             for l, x in zip(self.linears, (query, key, value))]
        scores = query @ key.swapaxes(-2, -1) / np.sqrt(self.d_k)
        if mask is not None:
            scores = np.where(mask == 0, -1e9, scores)
        self.attn = softmax(scores)
        x = (self.attn @ value).transpose(0, 2, 1, 3).reshape(n, -1, self.h * self.d_k)
        return self.linears[-1].forward(x)
'''),
    ("one input", '''
class Self:
    def __init__(self, config):
        self.num_attention_heads = config.num_attention_heads
        self.query, self.key, self.value = np.random.randn(3, config.hidden_size,
                                                           config.hidden_size)
    def __call__(self, hidden_states, attention_mask=None):
        def split(x):
            return x.reshape(*x.shape[:2], self.num_attention_heads, -1).transpose(0, 2, 1, 3)
        q, k, v = (split(hidden_states @ w) for w in (self.query, self.key, self.value))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None, None, :]) * -1e9
        out = (softmax(scores) @ v).transpose(0, 2, 1, 3)
        return out.reshape(*out.shape[:2], -1)
class Output:
    def __init__(self, config):
        self.dense = np.random.randn(config.hidden_size, config.hidden_size)
class Layer:  # attention.self.query, attention.output.dense
    def __init__(self, config):
        self.self, self.output = Self(config), Output(config)
    def forward(self, hidden_states, attention_mask=None):
        return self.self(hidden_states, attention_mask) @ self.output.dense
'''),
    ("", '''
class Layer:  # w_qs, fc; n_head, d_model, d_k, d_v
    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = np.random.randn(d_model, n_head * d_k)
        self.w_ks = np.random.randn(d_model, n_head * d_k)
        self.w_vs = np.random.randn(d_model, n_head * d_v)
        self.fc = np.random.randn(n_head * d_v, d_model)
    def forward(self, q, k, v, mask=None):
        b, lq, lk = q.shape[0], q.shape[1], k.shape[1]
        q = (q @ self.w_qs).reshape(b, lq, self.n_head, self.d_k).transpose(0, 2, 1, 3)
        k = (k @ self.w_ks).reshape(b, lk, self.n_head, self.d_k).transpose(0, 2, 1, 3)
        v = (v @ self.w_vs).reshape(b, lk, self.n_head, self.d_v).transpose(0, 2, 1, 3)
        attn = (q / self.d_k ** 0.5) @ k.swapaxes(2, 3)
        if mask is not None:
            attn = np.where(mask == 0, -1e9, attn)
        attn = softmax(attn)
        return (attn @ v).transpose(0, 2, 1, 3).reshape(b, lq, -1) @ self.fc, attn
'''),
    ("takes (len, batch, d_model)", '''
class Layer:
    def __init__(self, embed_dim, num_heads):
        self.num_heads = num_heads
        self.q_linear, self.k_linear, self.v_linear, self.out = np.random.randn(
            4, embed_dim, embed_dim)
    def __call__(self, query, key, value):
        def heads(x):
            return x.reshape(len(x), x.shape[1], self.num_heads, -1).transpose(1, 2, 0, 3)
        q, k, v = heads(query @ self.q_linear), heads(key @ self.k_linear), heads(
            value @ self.v_linear)
        y = softmax(q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5) @ v
        return y.transpose(2, 0, 1, 3).reshape(*query.shape) @ self.out
'''),
    ("takes (batch, len, heads, head_dim)", '''
def attention(q, k, v):
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return np.einsum("bhqk,bkhd->bqhd", softmax(s), v)
'''),
    ("takes (dim, len)", '''
def attention(Q, K, V):
    return V @ softmax(K.T @ Q / np.sqrt(Q.shape[0]), axis=0)
'''),
    ("", '''
def attention(x, params, num_heads):
    b, t, d = x.shape
    q, k, v = (np.reshape(x @ params[n], (b, t, num_heads, -1)).swapaxes(1, 2)
               for n in ("W_q", "W_k", "W_v"))
    y = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(d // num_heads)) @ v
    return y.swapaxes(1, 2).reshape(b, t, d) @ params["W_o"]
'''),
    ("", '''
def attention(X, W_q, W_k, W_v):  # one head, no output projection
    Q, K, V = X @ W_q, X @ W_k, X @ W_v
    return softmax(Q @ K.T / np.sqrt(K.shape[-1])) @ V
'''),
    ("", '''
def attention(Q, K, V, num_heads):  # no projections at all
    d = Q.shape[-1] // num_heads
    parts = [softmax(Q[..., i:i + d] @ K[..., i:i + d].swapaxes(-1, -2) / np.sqrt(d))
             @ V[..., i:i + d] for i in range(0, Q.shape[-1], d)]
    return np.concatenate(parts, axis=-1)
'''),
    ("", '''
class Layer:  # fused by head, as GPT-NeoX has it
    def __init__(self, hidden_size, num_heads):
        self.num_heads = num_heads
        self.query_key_value = np.random.randn(hidden_size, 3 * hidden_size)
        self.dense = np.random.randn(hidden_size, hidden_size)
    def __call__(self, x):
        b, t, c = x.shape
        y = (x @ self.query_key_value).reshape(b, t, self.num_heads, 3 * c // self.num_heads)
        q, k, v = np.split(y.transpose(0, 2, 1, 3), 3, axis=-1)
        z = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
        return z.swapaxes(1, 2).reshape(b, t, c) @ self.dense
'''),
    ("", '''
class Layer:  # keeps a fused copy of its weights
    def __init__(self, d_model, num_heads):
        self.h = num_heads
        self.Wq, self.Wk, self.Wv, self.Wo = np.random.randn(4, d_model, d_model)
        self._all = np.concatenate([self.Wq, self.Wk, self.Wv], axis=1)
    def __call__(self, x):
        q, k, v = (y.reshape(*y.shape[:2], self.h, -1).swapaxes(1, 2)
                   for y in np.split(x @ self._all, 3, axis=-1))
        z = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
        return z.swapaxes(1, 2).reshape(x.shape) @ self.Wo
'''),
    ("", '''
class Layer:  # W^O as a matrix a head, summed: the same as concatenating
    def __init__(self, d_model, num_heads):
        d = d_model // num_heads
        self.num_heads = num_heads
        self.W_Q = np.random.randn(num_heads, d_model, d)
        self.W_K = np.random.randn(num_heads, d_model, d)
        self.W_V = np.random.randn(num_heads, d_model, d)
        self.W_O = np.random.randn(num_heads, d, d_model)
    def forward(self, q, k, v):
        out = 0
        for a, b, c, o in zip(self.W_Q, self.W_K, self.W_V, self.W_O):
            w = softmax((q @ a) @ (k @ b).swapaxes(1, 2) / np.sqrt(a.shape[1]))
            out = out + w @ (v @ c) @ o
        return out
'''),
    ("", '''
class Layer:  # cross-attention: x and a context
    def __init__(self, dim, heads):
        self.heads = heads
        self.to_q, self.to_out = np.random.randn(2, dim, dim)
        self.to_kv = np.random.randn(dim, 2 * dim)
    def forward(self, x, context=None):
        context = x if context is None else context
        q = x @ self.to_q
        k, v = np.split(context @ self.to_kv, 2, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], self.heads, -1).swapaxes(1, 2) for y in (q, k, v))
        z = softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5) @ v
        return z.swapaxes(1, 2).reshape(x.shape) @ self.to_out
'''),
    ("always causal", '''
def causal_attention(q, k, v):
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(*s.shape[-2:]), s, -np.inf)) @ v
'''),
    ("counts from the first key", '''
def attention(q, k, v, causal=True):
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tri(*s.shape[-2:]), s, -np.inf)
    return softmax(s) @ v
'''),
    ("", '''
def attention(q, k, v, mask=None, dropout_p=0.1, training=False, return_attention=True, eps=1e-12):
    s = np.einsum("...qd,...kd->...qk", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        s = np.ma.masked_array(s, ~np.broadcast_to(mask, s.shape).astype(bool)).filled(-1e30)
    w = softmax(s)
    if training:
        w = w * (np.random.rand(*w.shape) > dropout_p) / (1 - dropout_p)
    return (w @ v, w) if return_attention else w @ v
'''),
    ("takes 2-D input only", '''
def attention(Q, K, V):  # lists of lists
    import math
    out = []
    for q in Q:
        s = [sum(a * b for a, b in zip(q, k)) / math.sqrt(len(q)) for k in K]
        e = [math.exp(x - max(s)) for x in s]
        out.append([sum(a * v[j] for a, v in zip(e, V)) / sum(e) for j in range(len(V[0]))])
    return out
'''),
    ("", '''
class attention:  # not a layer: a callable object without weights
    def __init__(self, d_k=None):
        pass
    def __call__(self, q, k, v):
        return softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v
'''),
    ("", '''
class Layer:  # DotProductAttention with dropout, and lengths
    def __init__(self, dropout):
        self.dropout = dropout
    def forward(self, queries, keys, values, valid_lens=None):
        s = queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1])
        if valid_lens is not None:
            lens = np.asarray(valid_lens)
            lens = lens[:, None, None] if lens.ndim == 1 else lens[:, :, None]
            s = np.where(np.arange(s.shape[-1]) < lens, s, -1e6)
        return softmax(s) @ values
'''),
]

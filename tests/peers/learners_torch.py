"""Attention as learners write it in PyTorch, in the manner of books, courses and well-known
programs: right code, and the same with one line wrong."""

from learners_attention import Mistake

FOUR_LINEARS = '''
def attention_of(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn

class Layer(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([copy.deepcopy(nn.Linear(d_model, d_model)) for _ in range(4)])
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))]
        x, self.attn = attention_of(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)
'''

GPT = '''
class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout
        self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size))
                             .view(1, 1, config.block_size, config.block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float('-inf'))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        y = self.resid_dropout(self.c_proj(y))
        return y
'''

FROM_SCRATCH = '''
class Layer(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.d_out, self.num_heads, self.head_dim = d_out, num_heads, d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length),
                                                diagonal=1))

    def forward(self, x):
        b, num_tokens, d_in = x.shape
        keys = self.W_key(x)
        queries = self.W_query(x)
        values = self.W_value(x)
        keys = keys.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = values.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        queries = queries.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        mask_bool = self.mask.bool()[:num_tokens, :num_tokens]
        attn_scores.masked_fill_(mask_bool, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1]**0.5, dim=-1)
        attn_weights = self.dropout(attn_weights)
        context_vec = (attn_weights @ values).transpose(1, 2)
        context_vec = context_vec.contiguous().view(b, num_tokens, self.d_out)
        return self.out_proj(context_vec)
'''

VISION = '''
class Layer(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False, attn_drop=0., proj_drop=0.):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))
'''

BY_HEAD = '''
def scaled_dot_product(q, k, v, mask=None):
    d_k = q.size()[-1]
    attn_logits = torch.matmul(q, k.transpose(-2, -1))
    attn_logits = attn_logits / math.sqrt(d_k)
    if mask is not None:
        attn_logits = attn_logits.masked_fill(mask == 0, -9e15)
    attention = F.softmax(attn_logits, dim=-1)
    return torch.matmul(attention, v), attention

class Layer(nn.Module):
    def __init__(self, input_dim, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.qkv_proj = nn.Linear(input_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None, return_attention=False):
        batch_size, seq_length, _ = x.size()
        if mask is not None:
            while mask.ndim < 4:
                mask = mask.unsqueeze(mask.ndim - 2)
        qkv = self.qkv_proj(x)
        qkv = qkv.reshape(batch_size, seq_length, self.num_heads, 3 * self.head_dim)
        qkv = qkv.permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        values, attention = scaled_dot_product(q, k, v, mask=mask)
        values = values.permute(0, 2, 1, 3)
        values = values.reshape(batch_size, seq_length, self.embed_dim)
        o = self.o_proj(values)
        return (o, attention) if return_attention else o
'''

LENGTHS = '''
def masked_softmax(X, valid_lens):
    if valid_lens is None:
        return nn.functional.softmax(X, dim=-1)
    shape = X.shape
    if valid_lens.dim() == 1:
        valid_lens = torch.repeat_interleave(valid_lens, shape[1])
    else:
        valid_lens = valid_lens.reshape(-1)
    X = X.reshape(-1, shape[-1])
    mask = torch.arange(X.size(1))[None, :] < valid_lens[:, None]
    X[~mask] = -1e6
    return nn.functional.softmax(X.reshape(shape), dim=-1)

class DotProductAttention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens=None):
        d = queries.shape[-1]
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(d)
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)

class Layer(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_k = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_v = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_o = nn.LazyLinear(num_hiddens, bias=bias)

    def forward(self, queries, keys, values, valid_lens):
        queries = self.transpose_qkv(self.W_q(queries))
        keys = self.transpose_qkv(self.W_k(keys))
        values = self.transpose_qkv(self.W_v(values))
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        output = self.attention(queries, keys, values, valid_lens)
        return self.W_o(self.transpose_output(output))

    def transpose_qkv(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1)
        X = X.permute(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])

    def transpose_output(self, X):
        X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2])
        X = X.permute(0, 2, 1, 3)
        return X.reshape(X.shape[0], X.shape[1], -1)
'''

HEAD_BY_HEAD = '''
class Head(nn.Module):
    def __init__(self, n_embd, head_size, block_size, dropout):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer('tril', torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1]**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float('-inf'))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)

class Layer(nn.Module):
    def __init__(self, n_embd, n_head, block_size, dropout):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // n_head, block_size, dropout)
                                    for _ in range(n_head)])
        self.proj = nn.Linear(n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))
'''

W_Q_TO_W_O = '''
class Layer(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, q, k, v, mask=None):
        query, key = self.split(self.w_q(q)), self.split(self.w_k(k))
        value = self.split(self.w_v(v))
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores.masked_fill_(mask == 0, -1e9)
        weights = scores.softmax(dim=-1)
        x = weights @ value
        x = x.transpose(1, 2).contiguous().view(x.size(0), -1, self.num_heads * self.d_k)
        return self.w_o(x)
'''

PARAMETERS = '''
class Layer(nn.Module):  # a matrix a head, and biases
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, self.d_head))
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, self.d_head))
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, self.d_head))
        self.W_O = nn.Parameter(torch.randn(n_heads, self.d_head, d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, self.d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, self.d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, self.d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        q = torch.einsum("bpm,nmh->bpnh", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpm,nmh->bpnh", x, self.W_K) + self.b_K
        v = torch.einsum("bpm,nmh->bpnh", x, self.W_V) + self.b_V
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / self.d_head ** 0.5
        scores.masked_fill_(torch.ones(scores.shape[-2:]).triu(1).bool(), -1e5)
        z = torch.einsum("bknh,bnqk->bqnh", v, scores.softmax(-1))
        return torch.einsum("bqnh,nhm->bqm", z, self.W_O) + self.b_O
'''

SINGLE = '''
class Layer(nn.Module):  # one head, plain parameters
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x):
        keys = x @ self.W_key
        queries = x @ self.W_query
        values = x @ self.W_value
        weights = torch.softmax(queries @ keys.mT / keys.shape[-1]**0.5, dim=-1)
        return weights @ values
'''

LUCID = '''
class Layer(nn.Module):
    def __init__(self, dim, heads=8, dim_head=64, dropout=0.):
        super().__init__()
        self.heads, self.scale = heads, dim_head ** -0.5
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(dim, dim_head * heads * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim_head * heads, dim), nn.Dropout(dropout))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2)
                   for t in self.to_qkv(x).chunk(3, dim=-1))
        attn = self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale)
        out = torch.matmul(attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))
'''

GROUPED = '''
class Layer(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        n = self.n_heads // self.n_kv_heads
        k = k.repeat_interleave(n, dim=1)
        v = v.repeat_interleave(n, dim=1)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))
'''

IN_PROJ = '''
class Layer(nn.Module):  # in the manner of nn.MultiheadAttention
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, key_padding_mask=None, is_causal=False):
        q, k, v = (F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                   for x, w, b in zip((query, key, value), self.in_proj_weight.chunk(3),
                                      self.in_proj_bias.chunk(3)))
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(
                1 + k.shape[2] - q.shape[2])
            scores = scores.masked_fill(future, float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out_proj(out)
'''

FUNCTION = '''
def attention(query, key, value, mask=None):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = torch.softmax(scores, dim=-1)
    return weights @ value, weights
Layer = attention
'''

RIGHT = {
    "four linears": FOUR_LINEARS, "a GPT": GPT, "from scratch": FROM_SCRATCH, "vision": VISION,
    "fused by head": BY_HEAD, "lengths": LENGTHS, "a list of heads": HEAD_BY_HEAD,
    "w_q to w_o": W_Q_TO_W_O, "a matrix a head": PARAMETERS, "one head": SINGLE, "to_qkv": LUCID,
    "grouped heads": GROUPED, "in_proj_weight": IN_PROJ, "a function": FUNCTION,
    "flash": GPT.replace("att = F.softmax(att, dim=-1)", "pass").replace(
        "att = self.attn_dropout(att)", "pass").replace(
        "y = att @ v", "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"),
    "a function of methods": FUNCTION.replace("torch.softmax(scores, dim=-1)", "scores.softmax(-1)")
    .replace("math.sqrt(query.size(-1))", "query.size(-1) ** 0.5"),
    "a batch of one": W_Q_TO_W_O.replace("x.view(x.size(0), -1, self", "x.view(1, -1, self"),
}

MISTAKES = [
    # The scale.
    Mistake("forgot to divide", FOUR_LINEARS, " / math.sqrt(d_k)", ""),
    Mistake("forgot to divide", FROM_SCRATCH, " / keys.shape[-1]**0.5", ""),
    Mistake("forgot to divide", VISION, "q = q * self.scale", "pass"),
    Mistake("divided by d_k instead", GPT, "(1.0 / math.sqrt(k.size(-1)))", "(1.0 / k.size(-1))"),
    Mistake("divided by sqrt(d_model)", VISION, "self.head_dim ** -0.5", "dim ** -0.5"),
    Mistake("divided by sqrt(d_model)", GPT, "math.sqrt(k.size(-1))", "math.sqrt(C)"),
    Mistake("multiplied by sqrt(d_k)", LUCID, "dim_head ** -0.5", "dim_head ** 0.5"),
    Mistake("hard-coded scale: the scores are divided by 8", W_Q_TO_W_O, "math.sqrt(self.d_k)",
            "8.0"),
    Mistake("after the softmax instead of before", FUNCTION,
            " / math.sqrt(query.size(-1))\n", "\n    value = value / math.sqrt(query.size(-1))\n"),
    # The softmax.
    Mistake("over the heads", VISION, "softmax(dim=-1)", "softmax(dim=1)"),
    Mistake("over the heads", GPT, "F.softmax(att, dim=-1)", "F.softmax(att, dim=1)"),
    Mistake("over the queries", FOUR_LINEARS, "softmax(dim=-1)", "softmax(dim=-2)"),
    Mistake("over the queries", HEAD_BY_HEAD, "F.softmax(wei, dim=-1)", "F.softmax(wei, dim=1)"),
    Mistake("(the batch)", LUCID, "nn.Softmax(dim=-1)", "nn.Softmax(dim=0)"),
    Mistake("forgot the softmax", W_Q_TO_W_O, "scores.softmax(dim=-1)", "scores"),
    Mistake("the softmax is applied twice", BY_HEAD, "F.softmax(attn_logits, dim=-1)",
            "F.softmax(attn_logits, dim=-1).softmax(-1)"),
    Mistake("log_softmax", VISION, "attn.softmax(dim=-1)", "attn.log_softmax(dim=-1)"),
    Mistake("switch dropout off", GPT, "self.attn_dropout(att)", "F.dropout(att, 0.1)"),
    # Splitting and merging.
    Mistake("heads reshaped without the transpose", W_Q_TO_W_O,
            "x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)",
            "x.view(x.size(0), self.num_heads, -1, self.d_k)"),
    Mistake("without the transpose when merging", GPT, "y.transpose(1, 2).contiguous()", "y"),
    Mistake("without the transpose when merging", FOUR_LINEARS, "x.transpose(1, 2).contiguous()",
            "x.contiguous()"),
    Mistake("without the transpose when merging", VISION, "x.transpose(1, 2).reshape", "x.reshape"),
    Mistake("heads interleaved", LUCID, "view(b, n, self.heads, -1).transpose(1, 2)",
            "view(b, n, -1, self.heads).permute(0, 3, 1, 2)"),
    Mistake("never split into heads", LUCID, "view(b, n, self.heads, -1).transpose(1, 2)",
            "view(b, n, 1, -1).transpose(1, 2)"),
    Mistake("heads concatenated in reverse", HEAD_BY_HEAD, "for h in self.heads]",
            "for h in list(self.heads)[::-1]]"),
    Mistake("heads share the first head's weights", HEAD_BY_HEAD,
            "[Head(n_embd, n_embd // n_head, block_size, dropout)\n"
            "                                    for _ in range(n_head)]",
            "[Head(n_embd, n_embd // n_head, block_size, dropout)] * n_head"),
    Mistake("interleaved the wrong way", GROUPED, "k = k.repeat_interleave(n, dim=1)\n"
            "        v = v.repeat_interleave(n, dim=1)",
            "k, v = k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1)"),
    # Projections.
    Mistake("forgot the output projection", VISION, "self.proj(x)", "x"),
    Mistake("forgot the output projection", GPT, "self.c_proj(y)", "y"),
    Mistake("forgot the output projection", FROM_SCRATCH, "self.out_proj(context_vec)",
            "context_vec"),
    Mistake("keys are projected with W_q", W_Q_TO_W_O, "self.w_k(k)", "self.w_q(k)"),
    Mistake("keys are projected with W_q", FROM_SCRATCH, "self.W_key(x)", "self.W_query(x)"),
    Mistake("queries are projected with W_k", LENGTHS, "self.W_q(queries)", "self.W_k(queries)"),
    Mistake("values are projected with W_k", SINGLE, "x @ self.W_value", "x @ self.W_key"),
    Mistake("in another order", GPT, "q, k, v = self.c_attn", "v, q, k = self.c_attn"),
    Mistake("values are not projected", W_Q_TO_W_O, "self.w_v(v)", "v"),
    Mistake("values are made from the query", FOUR_LINEARS, "(query, key, value))]",
            "(query, key, query))]"),
    Mistake("is transposed, unlike", IN_PROJ, "self.out_proj(out)",
            "out @ self.out_proj.weight + self.out_proj.bias"),
    Mistake("b_o is not added", IN_PROJ, "self.out_proj(out)", "out @ self.out_proj.weight.T"),
    Mistake("same array", W_Q_TO_W_O, "self.w_k = nn.Linear(d_model, d_model)",
            "self.w_k = self.w_q"),
    Mistake("residual connection", SINGLE, "return weights @ values",
            "return weights @ values + x"),
    # Masks.
    Mistake("off by one: a query sees the next key", GPT,
            "torch.ones(config.block_size, config.block_size))\n",
            "torch.ones(config.block_size, config.block_size), 1)\n"),
    Mistake("off by one: a query does not see its own key", FROM_SCRATCH, "diagonal=1",
            "diagonal=0"),
    Mistake("upside down", HEAD_BY_HEAD, "torch.tril(", "torch.triu("),
    Mistake("blocked scores become 0", GPT,
            "att.masked_fill(self.bias[:, :, :T, :T] == 0, float('-inf'))",
            "att * self.bias[:, :, :T, :T]"),
    Mistake("mask is applied after the softmax", FUNCTION,
            "    if mask is not None:\n        scores = scores.masked_fill(mask == 0, -1e9)\n"
            "    weights = torch.softmax(scores, dim=-1)\n",
            "    weights = torch.softmax(scores, dim=-1)\n"
            "    if mask is not None:\n        weights = weights.masked_fill(mask == 0, 0)\n"),
    Mistake("the mask has the wrong sign", FOUR_LINEARS, "-1e9", "1e9"),
    Mistake("the mask is ignored", BY_HEAD,
            "attn_logits = attn_logits.masked_fill(mask == 0, -9e15)",
            "attn_logits.masked_fill(mask == 0, -9e15)"),
    Mistake("<= lets one padded key in", LENGTHS, "< valid_lens[:, None]",
            "<= valid_lens[:, None]"),
    Mistake("is_causal: the mask is off by one", IN_PROJ, "1 + k.shape[2] - q.shape[2]",
            "k.shape[2] - q.shape[2]"),
    Mistake("key_padding_mask is used for the queries", IN_PROJ,
            "key_padding_mask[:, None, None, :]", "key_padding_mask[:, None, :q.size(2), None]"),
    # Others.
    Mistake("float16", VISION, "attn = q @ k", "attn = q.half().float() @ k.half().float()"),
    Mistake("changes its inputs", FROM_SCRATCH, "b, num_tokens, d_in = x.shape",
            "b, num_tokens, d_in = x.mul_(1.5).shape"),
    Mistake("still get some weight", FUNCTION, "-1e9", "-20"),
]

"""Mistakes that teachers know, in attention itself: each beside right code that looks like it.

A Mistake is a line of right code, the wrong line that learners write instead, and another right
line that looks like the wrong one.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    name: str  # words that the diagnosis must have
    code: str  # right code with `right` in it
    right: str
    wrong: str
    alike: str | None = None  # right, too

    def source(self, line):
        assert self.code.count(self.right) == 1, (self.name, self.right)
        return self.code.replace(self.right, line)


ATTENTION = '''
def attention(query, key, value):
    d_k = query.shape[-1]
    scores = query @ np.swapaxes(key, -1, -2)
    scores = scores / np.sqrt(d_k)
    largest = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - largest)
    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    output = weights @ value
    return output, weights
'''
SCALE = "scores = scores / np.sqrt(d_k)\n"
SCORES = "scores = query @ np.swapaxes(key, -1, -2)"
WEIGHTS = "weights = exponentials / exponentials.sum(axis=-1, keepdims=True)"
EXP = "exponentials = np.exp(scores - largest)"
OUTPUT = "output = weights @ value"
RETURN = "return output, weights"
LOOPS = '''
def attention(Q, K, V):
    n, m, d = len(Q), len(K), Q.shape[1]
    out = np.zeros((n, V.shape[1]))
    for i in range(n):
        s = np.array([Q[i] @ K[j] / np.sqrt(d) for j in range(m)])
        w = np.exp(s - s.max())
        w /= w.sum()
        for j in range(m):
            out[i] += w[j] * V[j]
    return out
'''
EINSUM = '''
def attention(q, k, v):
    logits = np.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    probs = softmax(logits)
    return np.einsum("bhqk,bhkd->bhqd", probs, v)
'''

MISTAKES = [
    # The scale.
    Mistake("forgot to divide by sqrt(d_k)", ATTENTION, SCALE, "pass\n",
            "scores *= 1 / np.sqrt(d_k)\n"),
    Mistake("divided by d_k instead of sqrt(d_k)", ATTENTION, SCALE, "scores = scores / d_k\n",
            "scores = scores / d_k ** 0.5\n"),
    Mistake("divided by d_k instead of sqrt(d_k)", ATTENTION, SCALE,
            "scores = scores / np.sqrt(d_k) / np.sqrt(d_k)\n",
            "scores = scores / d_k ** 0.25 / d_k ** 0.25\n"),
    Mistake("multiplied by sqrt(d_k)", ATTENTION, SCALE, "scores = scores * np.sqrt(d_k)\n",
            "scores = scores * d_k ** -0.5\n"),
    Mistake("divided by the fourth root", ATTENTION, SCALE, "scores = scores / d_k ** 0.25\n",
            "scores = scores / (d_k ** 0.25) ** 2\n"),
    Mistake("hard-coded scale: the scores are divided by 8 ", ATTENTION, SCALE,
            "scores = scores / 8.0\n", "scores = scores / (d_k / np.sqrt(d_k))\n"),
    Mistake("hard-coded scale: the scores are divided by sqrt(8)", ATTENTION, SCALE,
            "scores = scores / np.sqrt(8)\n", "scores = scores / np.sqrt(key.shape[-1])\n"),
    Mistake("hard-coded scale: the scores are divided by sqrt(512)", ATTENTION, SCALE,
            "scores = scores / np.sqrt(512)\n"),
    Mistake("square root of the number of keys", ATTENTION, SCALE,
            "scores = scores / np.sqrt(key.shape[-2])\n",
            "scores = scores / np.sqrt(key.shape[-1])\n"),
    Mistake("square root of the number of queries", ATTENTION, "d_k = query.shape[-1]",
            "d_k = query.shape[-2]", "d_k = key.shape[-1]"),
    Mistake("sqrt(d_v) instead of sqrt(d_k)", ATTENTION, "d_k = query.shape[-1]",
            "d_k = value.shape[-1]"),
    Mistake("after the softmax instead of before", ATTENTION, WEIGHTS,
            "weights = softmax(query @ np.swapaxes(key, -1, -2)) / np.sqrt(d_k)",
            "weights = softmax(query @ np.swapaxes(key, -1, -2) / np.sqrt(d_k))"),
    Mistake("before the softmax and again after it", ATTENTION, OUTPUT,
            "output = weights @ value / np.sqrt(d_k)", "output = np.matmul(weights, value)"),
    Mistake("divided by the number of queries", ATTENTION, SCALE,
            "scores = scores / np.sqrt(len(query) if query.ndim == 2 else query.shape[-2] ** 2)\n",
            "scores = scores / np.sqrt(query[..., 0, :].shape[-1])\n"),
    Mistake("divided by 2 * sqrt(d_k)", ATTENTION, SCALE, "scores = scores / (2 * np.sqrt(d_k))\n",
            "scores = 2 * scores / np.sqrt(4 * d_k)\n"),
    # The scores.
    Mistake("keys are not transposed", ATTENTION, SCORES, "scores = query @ key",
            'scores = np.einsum("...qd,...kd->...qk", query, key)'),
    Mistake("reshaped instead of transposed", ATTENTION, SCORES,
            "scores = query @ key.reshape(*key.shape[:-2], key.shape[-1], key.shape[-2])",
            "scores = query @ np.moveaxis(key, -1, -2)"),
    Mistake("query and key are swapped", ATTENTION, SCORES,
            "scores = key @ np.swapaxes(query, -1, -2)",
            "scores = np.swapaxes(key @ np.swapaxes(query, -1, -2), -1, -2)"),
    Mistake("wrong sign", ATTENTION, SCORES, "scores = -query @ np.swapaxes(key, -1, -2)",
            "scores = -(-query @ np.swapaxes(key, -1, -2))"),
    Mistake("keys are made from the query", ATTENTION, SCORES,
            "key = query\n    scores = query @ np.swapaxes(key, -1, -2)"),
    Mistake("minus distances", ATTENTION, SCORES,
            "scores = -np.linalg.norm(query[..., :, None, :] - key[..., None, :, :], axis=-1)",
            "scores = (query[..., :, None, :] * key[..., None, :, :]).sum(axis=-1)"),
    Mistake("cosines", ATTENTION, "d_k = query.shape[-1]",
            "d_k = query.shape[-1]\n    query = query / np.linalg.norm(query, axis=-1, "
            "keepdims=True)\n    key = key / np.linalg.norm(key, axis=-1, keepdims=True)"),
    Mistake("a slice is one short", ATTENTION, SCORES,
            "scores = query[..., :-1] @ np.swapaxes(key[..., :-1], -1, -2)",
            "scores = query[..., :] @ np.swapaxes(key[..., :d_k], -1, -2)"),
    Mistake("scores are squared", ATTENTION, SCORES,
            "scores = (query @ np.swapaxes(key, -1, -2)) ** 2",
            "scores = (query @ np.swapaxes(key, -1, -2)) ** 1"),
    Mistake("the scores are made positive", ATTENTION, SCORES,
            "scores = np.abs(query @ np.swapaxes(key, -1, -2))"),
    # The softmax.
    Mistake("over the queries instead of the keys", ATTENTION, EXP + "\n    " + WEIGHTS,
            "exponentials = np.exp(scores - scores.max(axis=-2, keepdims=True))\n"
            "    weights = exponentials / exponentials.sum(axis=-2, keepdims=True)",
            "exponentials = np.exp(scores - scores.max(axis=-1)[..., None])\n"
            "    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)"),
    Mistake("over all scores at once", ATTENTION, EXP + "\n    " + WEIGHTS,
            "weights = np.exp(scores) / np.sum(np.exp(scores))",
            "weights = np.exp(scores - largest) / np.sum(np.exp(scores - largest), axis=-1)"
            "[..., None]"),
    Mistake("divided by the sum over the queries", ATTENTION, WEIGHTS,
            "weights = exponentials / exponentials.sum(axis=-2, keepdims=True)"),
    Mistake("divided by the sum of all", ATTENTION, WEIGHTS,
            "weights = exponentials / exponentials.sum()"),
    Mistake("3-D input: softmax over the wrong axis", ATTENTION, EXP + "\n    " + WEIGHTS,
            "weights = np.exp(scores - scores.max(1, keepdims=True))\n"
            "    weights = weights / weights.sum(1, keepdims=True)",
            "weights = np.exp(scores - scores.max(-1, keepdims=True))\n"
            "    weights = weights / weights.sum(-1, keepdims=True)"),
    Mistake("forgot the softmax", ATTENTION, WEIGHTS, "weights = scores",
            "weights = softmax(scores)"),
    Mistake("softmax is not normalised", ATTENTION, WEIGHTS, "weights = exponentials",
            "weights = exponentials * (1 / exponentials.sum(axis=-1, keepdims=True))"),
    Mistake("softmax lacks its exp", ATTENTION, WEIGHTS,
            "weights = scores / scores.sum(axis=-1, keepdims=True)"),
    Mistake("softmax is applied twice", ATTENTION, WEIGHTS, "weights = softmax(softmax(scores))",
            "weights = softmax(np.log(softmax(scores)))"),
    Mistake("log_softmax", ATTENTION, WEIGHTS, "weights = np.log(softmax(scores))",
            "weights = np.exp(np.log(softmax(scores)))"),
    Mistake("sigmoid instead of softmax", ATTENTION, WEIGHTS,
            "weights = 1 / (1 + np.exp(-scores))"),
    Mistake("tanh instead of softmax", ATTENTION, WEIGHTS, "weights = np.tanh(scores)"),
    Mistake("argmax", ATTENTION, WEIGHTS, "weights = (scores == largest).astype(float)"),
    Mistake("2 ** x instead of exp", ATTENTION, EXP, "exponentials = 2 ** (scores - largest)",
            "exponentials = 2 ** ((scores - largest) / np.log(2))"),
    Mistake("the scores have the wrong sign", ATTENTION, EXP,
            "exponentials = np.exp(scores.min(axis=-1, keepdims=True) - scores)",
            "exponentials = 1 / np.exp(largest - scores)"),
    Mistake("overflows at large scores", ATTENTION, EXP, "exponentials = np.exp(scores)",
            "exponentials = np.exp(scores - np.max(scores, axis=-1)[..., None])"),
    Mistake("divided by the sum of the row", ATTENTION, WEIGHTS,
            "weights = exponentials / exponentials.max(axis=-1, keepdims=True)"),
    Mistake("1 + the sum", ATTENTION, EXP + "\n    " + WEIGHTS,
            "weights = np.exp(scores) / (1 + np.exp(scores).sum(axis=-1, keepdims=True))"),
    Mistake("L2 norm", ATTENTION, WEIGHTS,
            "weights = exponentials / np.linalg.norm(exponentials, axis=-1, keepdims=True)",
            "weights = exponentials / np.linalg.norm(exponentials, 1, axis=-1, keepdims=True)"),
    Mistake("all weights are equal", ATTENTION, WEIGHTS,
            "weights = np.ones_like(scores) / scores.shape[-1]"),
    Mistake("0 ... 1 instead of softmax", ATTENTION, WEIGHTS,
            "weights = (scores - scores.min(-1, keepdims=True))"
            " / (largest - scores.min(-1, keepdims=True))"),
    Mistake("epsilon", ATTENTION, WEIGHTS,
            "weights = exponentials / (exponentials.sum(axis=-1, keepdims=True) + 1e-2)",
            "weights = exponentials / (exponentials.sum(axis=-1, keepdims=True) + 1e-9)"),
    # The values, and what comes out.
    Mistake("weights are transposed", ATTENTION, OUTPUT,
            "output = np.swapaxes(weights, -1, -2) @ value",
            "output = np.swapaxes(np.swapaxes(value, -1, -2) @ np.swapaxes(weights, -1, -2),"
            " -1, -2)"),
    Mistake("values are made from the key", ATTENTION, OUTPUT, "output = weights @ key"),
    Mistake("values are made from the query", ATTENTION, "d_k = query.shape[-1]",
            "value = query\n    d_k = query.shape[-1]"),
    Mistake("key and value are swapped", ATTENTION, "d_k = query.shape[-1]",
            "key, value = value, key\n    d_k = query.shape[-1]",
            "(key, value) = (key, value)\n    d_k = query.shape[-1]"),
    Mistake("never meet the values", ATTENTION, RETURN, "return weights", "return output"),
    Mistake("averaged again", ATTENTION, OUTPUT, "output = weights @ value / key.shape[-2]"),
    Mistake("averaged over the queries", ATTENTION, RETURN, "return output.mean(axis=-2)"),
    Mistake("residual connection", ATTENTION, RETURN,
            "return output + value", "return output + 0 * query[..., :1, :1], weights"),
    Mistake("reverse order, unlike the values", ATTENTION, OUTPUT,
            "output = weights @ value[..., ::-1, :]",
            "output = weights[..., ::-1] @ value[..., ::-1, :]"),
    Mistake("no sum over the keys", ATTENTION, OUTPUT,
            'output = np.einsum("...ii,...id->...id", weights, value)',
            'output = np.einsum("...ij,...jd->...id", weights, value)'),
    Mistake("the first item", ATTENTION, OUTPUT,
            "output = weights @ value[0]", "output = weights @ value[:]"),
    Mistake("float16", ATTENTION, OUTPUT,
            "output = weights.astype(np.float16) @ value.astype(np.float16)",
            "output = weights.astype(np.float32) @ value.astype(np.float32)"),
    Mistake("float16", ATTENTION, "d_k = query.shape[-1]",
            "query, key, value = (x.astype(np.float16) for x in (query, key, value))\n"
            "    d_k = query.shape[-1]",
            "query, key, value = (x.astype(np.float32) for x in (query, key, value))\n"
            "    d_k = query.shape[-1]"),
    Mistake("integers", ATTENTION, RETURN, "return output.astype(int)",
            "return output.astype(float)"),
    Mistake("not the weights used", ATTENTION, RETURN, "return output, scores",
            "return output, weights.copy()"),
    Mistake("is the return statement missing?", ATTENTION, RETURN, "(output, weights)"),
    Mistake("changes its inputs", ATTENTION, "d_k = query.shape[-1]\n",
            "d_k = query.shape[-1]\n    query /= 1.0 + 1e-9\n",
            "d_k = query.shape[-1]\n    query = query / 1.0\n"),
    Mistake("switch dropout off", ATTENTION, OUTPUT,
            "weights = weights * (np.random.random(weights.shape) > 0.1) / 0.9\n"
            "    output = weights @ value"),
    Mistake("the causal mask is always on", ATTENTION, SCALE,
            "scores = scores / np.sqrt(d_k)\n"
            "    scores = np.where(np.tri(*scores.shape[-2:]), scores, -1e9)\n",
            "scores = scores / np.sqrt(d_k)\n"
            "    scores = np.where(np.ones(scores.shape[-2:]), scores, -1e9)\n"),
    Mistake("own key: the diagonal is blocked", ATTENTION, SCALE,
            "scores = scores / np.sqrt(d_k)\n"
            "    scores = np.where(np.eye(*scores.shape[-2:]), -1e9, scores)\n"),
    # The same in other styles.
    Mistake("weights of the last key are missing", LOOPS, "for j in range(m):\n            out",
            "for j in range(m - 1):\n            out", "for j in range(0, m):\n            out"),
    Mistake("softmax is not normalised", LOOPS, "w /= w.sum()", "pass", "w = w / w.sum()"),
    Mistake("forgot to divide", LOOPS, "Q[i] @ K[j] / np.sqrt(d)", "Q[i] @ K[j]",
            "np.dot(K[j], Q[i]) / d ** 0.5"),
    Mistake("square root of the number of keys", LOOPS, "np.sqrt(d)", "np.sqrt(m)"),
    Mistake("weights are transposed", EINSUM, '"bhqk,bhkd->bhqd"', '"bhkq,bhkd->bhqd"'),
    Mistake("first head", EINSUM, '"bhqd,bhkd->bhqk", q, k',
            '"bhqd,bkd->bhqk", q, k[:, 0]'),
    Mistake("divided by d_k instead", EINSUM, "-0.5", "-1", "-(1 / 2)"),
    Mistake("averaged over the heads", EINSUM, "probs = softmax(logits)",
            "probs = softmax(logits)\n    probs = np.broadcast_to(probs.mean(1, keepdims=True),"
            " probs.shape)", "probs = softmax(logits.copy())"),
]

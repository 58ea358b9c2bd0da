"""The model of examples/train_language_model.py as PyTorch's users write it: one product for query,
key and value, fused attention where dropout allows it, fused Adam."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.feed_in, self.feed_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                             for part in self.query_key_value(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.merge(heads.transpose(1, 2).flatten(-2))

    def drop(self, x):
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x):
        x = x + self.drop(self.attend(self.norm_1(x)))
        return x + self.drop(self.feed_out(F.relu(self.feed_in(self.norm_2(x)))))


class LanguageModel(nn.Module):
    def __init__(self, num_tokens, settings):
        super().__init__()
        width = settings.width
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(settings.context, width)
        self.blocks = nn.Sequential(*(Block(width, settings.heads, settings.dropout)
                                      for _ in range(settings.blocks)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, num_tokens)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]]
        return self.logits(self.norm(self.blocks(x)))

    @torch.no_grad()
    def load(self, parameters):
        """`parameters` of the NumPy model by name; its weights are (in, out), PyTorch's (out, in).
        """
        numbers = {name: torch.from_numpy(array.copy()) for name, array in parameters.items()}

        def set_norm(norm, name):
            norm.weight.copy_(numbers[f"{name}.scale"])
            norm.bias.copy_(numbers[f"{name}.shift"])

        def set_linear(linear, weights, biases):
            linear.weight.copy_(torch.cat([numbers[name].T for name in weights]))
            linear.bias.copy_(torch.cat([numbers[name] for name in biases]))

        self.tokens.weight.copy_(numbers["tokens"])
        self.positions.weight.copy_(numbers["positions"])
        for i, block in enumerate(self.blocks):
            names = [f"{i}.attention.{letter}" for letter in ("W_q", "W_k", "W_v")]
            biases = [f"{i}.attention.{letter}" for letter in ("b_q", "b_k", "b_v")]
            set_norm(block.norm_1, f"{i}.norm_1")
            set_norm(block.norm_2, f"{i}.norm_2")
            set_linear(block.query_key_value, names, biases)
            set_linear(block.merge, [f"{i}.attention.W_o"], [f"{i}.attention.b_o"])
            set_linear(block.feed_in, [f"{i}.W_in"], [f"{i}.b_in"])
            set_linear(block.feed_out, [f"{i}.W_out"], [f"{i}.b_out"])
        set_norm(self.norm, "norm")
        set_linear(self.logits, ["W_logits"], ["b_logits"])


class Training:
    """Steps on the batches of a NumPy training, from the same start, by the same rule."""

    def __init__(self, training):
        self.training = training
        self.model = LanguageModel(len(training.text.characters), training.settings)
        self.model.load(training.model.parameters)
        self.adam = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.99), eps=1e-8,
                                     fused=True)
        self.losses = []

    def step(self):
        step = len(self.losses) + 1
        tokens, targets, _ = self.training.batch_of(step)
        for group in self.adam.param_groups:
            group["lr"] = self.training.learning_rate(step)
        logits = self.model(torch.from_numpy(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        self.adam.step()
        self.losses.append(loss.item())
        return loss.item()

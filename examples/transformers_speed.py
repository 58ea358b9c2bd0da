"""How fast a model of the transformers package is under "sdpa", "eager" and mha's attention.

    python examples/transformers_speed.py [--rounds 7] [--length 1024] [--threads 1 2]
        [--tasks prefill training generation]

Needs torch and transformers. The model is GPT-2 small with random weights. Three tasks: prefill, a
training step with dropout, and generation token by token. All implementations attend for the same
model in one process, pinned to the first cores: where the weights of a model lie in memory makes as
much difference as its attention. Rounds are interleaved, and medians are shown. Beside the whole
model the attention is timed by itself, backwards too: its share s of the model under "sdpa", and
how many times as fast r it is under "mha". By that a model gains 1 / (1 - s + s / r).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time

IMPLEMENTATIONS = ("sdpa", "eager", "mha")
TASKS = ("prefill", "training", "generation")


def size(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, wanted at least 1")
    return number


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, meaning in (
            ("layers", 12, "of the model"), ("heads", 12, "of each layer"),
            ("width", 768, "of the model"), ("length", 1024, "tokens of a sequence"),
            ("new", 64, "tokens that are generated, the last of the sequence"),
            ("batch", 1, "sequences"), ("rounds", 7, "whose medians are shown")):
        parser.add_argument("--" + name, type=size, default=default,
                            help=f"{meaning}; {default} by default")
    parser.add_argument("--threads", type=size, nargs="+", default=[1, 2], help="1 2 by default")
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=TASKS, help="all by default")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # not in a child
    sizes = parser.parse_args(arguments)
    if sizes.new >= sizes.length:
        parser.error(f"--new: got {sizes.new}, wanted fewer than the {sizes.length} of --length")
    if sizes.width % sizes.heads:
        parser.error(f"--width: got {sizes.width}, wanted a multiple of the {sizes.heads} --heads")
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        parser.exit(1, f"missing: {', '.join(missing)}. Install with: pip install"
                       f" {' '.join(missing)}\n")
    return sizes


# One process: an implementation, which runs a task for each line that it reads.

def build(sizes):
    """GPT-2 with random weights, and a sequence of random tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from mha.compat import transformers as mha_transformers

    mha_transformers.register()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        n_layer=sizes.layers, n_head=sizes.heads, n_embd=sizes.width, n_positions=sizes.length))
    return model, torch.randint(model.config.vocab_size, (sizes.batch, sizes.length))


def tasks_of(model, tokens, new):
    """Functions that run a task once, untimed parts first: each returns (seconds, a number)."""
    import torch

    def timed(run):
        start = time.perf_counter()
        number = run()
        return time.perf_counter() - start, float(number)

    @torch.no_grad()
    def prefill():
        model.eval()
        return timed(lambda: model(tokens, logits_to_keep=1).logits.square().mean())

    def training():
        model.train()
        model.zero_grad()

        def step():
            loss = model(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            return loss.detach()

        return timed(step)

    @torch.no_grad()
    def generation():
        model.eval()
        cache = model(tokens[:, :-new], logits_to_keep=1, use_cache=True).past_key_values

        def steps():
            for position in range(tokens.shape[1] - new, tokens.shape[1]):
                logits = model(tokens[:, position:position + 1], past_key_values=cache).logits
            return logits.square().mean()

        return timed(steps)

    return {"prefill": prefill, "training": training, "generation": generation}


def probe(model):
    """Time the attention inside the model, too: a list that gathers the seconds of each call,
    forwards and backwards, while the one that is returned beside it is not empty."""
    import torch
    from transformers import AttentionInterface

    seconds, switch = [], []

    class Ends(torch.autograd.Function):  # its backward: the attention's has ended
        @staticmethod
        def forward(ctx, *inputs):
            return tuple(tensor.view_as(tensor) for tensor in inputs)

        @staticmethod
        def backward(ctx, *gradients):
            seconds[-1] += time.perf_counter()
            return gradients

    class Begins(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            return output.view_as(output)

        @staticmethod
        def backward(ctx, gradient):
            seconds.append(-time.perf_counter())
            return gradient

    def probed(attend):
        def attend_probed(module, query, key, value, *others, **options):
            if not switch:
                return attend(module, query, key, value, *others, **options)
            if query.requires_grad:
                query, key, value = Ends.apply(query, key, value)
            start = time.perf_counter()
            output, weights = attend(module, query, key, value, *others, **options)
            seconds.append(time.perf_counter() - start)
            return Begins.apply(output) if output.requires_grad else output, weights

        return attend_probed

    of_model = sys.modules[type(model).__module__]
    of_model.eager_attention_forward = probed(of_model.eager_attention_forward)
    for name in ("sdpa", "mha"):
        AttentionInterface.register(name, probed(AttentionInterface()[name]))
    return seconds, switch


def measured(sizes):
    """Each task and {implementation: (whole, attention, number)}, medians over the rounds."""
    import torch

    torch.set_num_threads(sizes.threads[0])
    model, tokens = build(sizes)
    seconds, switch = probe(model)
    tasks = tasks_of(model, tokens, sizes.new)

    def run(task):
        switch.clear()
        whole, number = tasks[task]()
        switch.append(True)
        seconds.clear()
        tasks[task]()
        calls = sizes.layers * sizes.new if task == "generation" else len(seconds)
        return whole, sum(seconds[-calls:]), number

    for task in sizes.tasks:
        answers = {name: [] for name in IMPLEMENTATIONS}
        for turn in range(sizes.rounds + 1):
            for name in IMPLEMENTATIONS:
                model.set_attn_implementation(name)
                answer = run(task)
                if turn:  # the first is for caches and allocators
                    answers[name].append(answer)
        yield task, {name: [statistics.median(column) for column in zip(*rows, strict=True)]
                     for name, rows in answers.items()}


def report(threads, task, results):
    (whole, attention, number), (eager, *_), (ours, our_attention, our_number) = (
        results[name] for name in IMPLEMENTATIONS)
    share, ratio = attention / whole, attention / our_attention
    promised = 1 / (1 - share + share / ratio)
    print(f"{threads:7} {task:11}{whole * 1e3:9.1f}{eager * 1e3:9.1f}{ours * 1e3:9.1f}"
          f"{share:9.1%}{ratio:10.2f}{promised:10.3f}{whole / ours:10.3f}", flush=True)
    if abs(our_number / number - 1) > (0.1 if task == "training" else 1e-3):
        raise SystemExit(f"{task}: mha's result {our_number} is not sdpa's {number}")


def run_in_child(threads, arguments):
    """The measurements with so many threads, in a process that has them from its start."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    count = {name: str(threads) for name in ("OMP_NUM_THREADS", "MHA_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--threads", str(threads), "--here"],
        env={**os.environ, **count, "TRANSFORMERS_VERBOSITY": "error"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores))
    if done.returncode != 0:
        raise SystemExit(done.returncode)


def main(arguments=None):
    sizes = parsed(arguments)
    if sizes.here:
        for task, results in measured(sizes):
            report(sizes.threads[0], task, results)
        return
    print("threads task         sdpa ms eager ms   mha ms  share s attention  promised  measured")
    print("                                                of sdpa sdpa/mha  sdpa/mha  sdpa/mha",
          flush=True)
    given = [f"--{name}={getattr(sizes, name)}" for name in (
        "layers", "heads", "width", "length", "new", "batch", "rounds")]
    for threads in sizes.threads:
        run_in_child(threads, [*given, "--tasks", *sizes.tasks])


if __name__ == "__main__":
    main()

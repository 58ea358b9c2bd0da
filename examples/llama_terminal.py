"""What stands on the terminal for llama.py: the command line, prompts, texts and how fast they
were."""

import argparse
import sys
import time


def arguments(about):
    parser = argparse.ArgumentParser(description=about,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", help="a folder with config.json and *.safetensors, or a .gguf")
    parser.add_argument("prompts", nargs="*", help="without any: standard input, a line each")
    parser.add_argument("--tokenizer", help="a tokenizer.json, in place of the model's own")
    parser.add_argument("--template", default="{}",
                        help="what stands around each prompt ({}), as models for chats want it;"
                             " \\n is a new line")
    parser.add_argument("--quantize", choices=("q8_0", "q4_0"), help="the matrices, to so few bits")
    parser.add_argument("--cache", choices=("float32", "float16", "q8_0"), default="float32",
                        help="in which keys and values are kept")
    parser.add_argument("--together", type=int, default=8,
                        help="how many of several prompts are answered at once, the others as these"
                             " end; 1: one by one, shown as it is written")
    parser.add_argument("--tokens", type=int, default=128, help="how many to write at most")
    parser.add_argument("--temperature", type=float, default=0.7,
                        help="divides the logits: 0 takes the likeliest each time")
    parser.add_argument("--top-k", type=int, default=40, help="draw from so many; 0: from all")
    parser.add_argument("--top-p", type=float, default=0.95,
                        help="draw from the likeliest whose probabilities sum to this")
    parser.add_argument("--seed", type=int, default=0, help="of the draws, of each prompt its own")
    given = parser.parse_args()
    for name in ("tokens", "together", "top_k", "seed", "temperature"):
        least = 1 if name in ("tokens", "together") else 0
        if not getattr(given, name) >= least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(given, name)}, wanted at least"
                         f" {least}")
    if not 0 < given.top_p <= 1:
        parser.error(f"--top-p: got {given.top_p}, wanted a share in (0, 1]")
    if "{}" not in given.template:
        parser.error(f"--template: got {given.template!r}, wanted {{}} where the prompt stands")
    return given


def prompts(given):
    """Those that are given, or lines as they come; what nobody has typed here is shown."""
    for prompt in given:
        print(f"> {prompt}", flush=True)
        yield prompt
    while not given:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not sys.stdin.isatty():
            print(line, flush=True)
        yield line


def show(text, prompt, tokens):
    """The text of tokens as they come, then how fast that was."""
    begin = time.perf_counter()
    times = []
    for piece in text.pieces(tokens):
        times.append(time.perf_counter())
        print(piece, end="", flush=True)
    first, last = (times[0], times[-1]) if times else (time.perf_counter(),) * 2
    # The first token is the prompt's work.
    print(f"\n\nprompt: {_rate(len(prompt.tokens), first - begin)};"
          f" generation: {_rate(len(times) - 1, last - first)}\n")


def show_together(text, prompts, tokens):
    """The text behind each prompt when it is whole, then how fast all were: of (number, token), and
    (number, None) behind the last of a prompt."""
    begin, texts, ended, count = time.perf_counter(), [[] for _ in prompts], 0, 0
    for number, token in tokens:
        if token is None:
            ended += 1
            _show_progress("")
            whole = "".join(text.pieces(texts[number]))
            print(f"> {prompts[number].said}\n{whole}\n", flush=True)
        else:
            count += 1
            texts[number].append(token)
        _show_progress(f"prompts: {ended} of {len(prompts)}; tokens: {count}")
    _show_progress("")
    read = sum(len(prompt.tokens) for prompt in prompts)
    print(f"prompts: {len(prompts)}, of {read} tokens; generation with them:"
          f" {_rate(count, time.perf_counter() - begin)}\n")


def _show_progress(said):
    """A line of a terminal whose place the next one takes."""
    if sys.stderr.isatty():
        print(f"\r{said:60}\r", end="", file=sys.stderr, flush=True)


def _rate(tokens, seconds):
    return f"{tokens} tokens, {tokens / seconds:,.1f} a second" if tokens > 0 else "none"

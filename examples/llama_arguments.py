"""The command line of llama.py: its options, and the prompts one by one."""

import argparse
import sys


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

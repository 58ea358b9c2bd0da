"""Every model of the installed transformers that asks for an attention implementation, under
"mha" beside "eager": `make sweep-transformers`.

    python tests/peers/sweep_transformers.py [NAME ...] [--json FILE] [--table FILE]

The denominator comes first: each modeling file of the package that names its table of
implementations, or has a class that says that it supports them. Each has a row; a model that ends
its process, or takes too long, is a row too.
"""

import argparse
import importlib
import json
import multiprocessing
import re
import time
from pathlib import Path

import torch
import transformers
from model_checks import Pair, checks, count_calls, made_calls, reason
from small_configs import WINDOW, small_config
from sweep_table import RAN, write_table
from tqdm import tqdm
from transformers import PreTrainedModel

from mha.compat import transformers as compat

MODELS = Path(transformers.models.__path__[0])
ASKS = re.compile(r"\bALL_ATTENTION_FUNCTIONS\b|\b_supports_attention_backend\s*=\s*True\b")
SECONDS = 150  # of the CPU, of a model; it may take four times as long on a busy machine
PROCESSES = 2
MEMORY = 12 << 30  # bytes of addresses that a model may have
LARGEST_MODEL = 50_000_000  # parameters
EAGER_RUNS, MHA_CALLED = 0.85, 0.9  # at least
HEADS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "Model")


def names():
    """The denominator: a name such as "llama" for models/llama/modeling_llama.py."""
    files = [path for path in sorted(MODELS.glob("*/modeling_*.py"))
             if ASKS.search(path.read_text(encoding="utf-8"))]
    return [path.parent.name if path.stem == f"modeling_{path.parent.name}"
            else f"{path.parent.name}/{path.stem.removeprefix('modeling_')}" for path in files]


def classes(name):
    """The model classes of a file, those that write text first."""
    folder, _, file = name.partition("/")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{file or folder}")
    found = [each for each in vars(module).values()
             if isinstance(each, type) and issubclass(each, PreTrainedModel)
             and each.__module__ == module.__name__ and each.config_class is not None
             and "PreTrainedModel" not in each.__name__]
    ends = {each: next((place for place, end in enumerate(HEADS) if each.__name__.endswith(end)),
                       len(HEADS)) for each in found}
    return sorted(found, key=ends.get)


def row_of(name):
    """What the table says of a model file: of the first class that calls mha, else of the first
    that "eager" runs, else why none of the first four does."""
    row, reasons = None, []
    try:
        tried = classes(name)[:4]
    except Exception as error:
        return {"status": "not buildable", "reason": reason(error)}
    for cls in tried:
        for layers in (2, 4, 8):  # an eighth layer may be the first that attends
            try:
                found = row_of_class(cls, layers)
            except Exception as error:
                reasons.append(f"{cls.__name__}: {reason(error)}")
                continue
            if found["status"] != "not called":
                return found
            row = row or found
    return row or {"status": "not buildable", "reason": reasons[0] if reasons else "no class"}


def row_of_class(cls, layers):
    config = small_config(cls.config_class, layers)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls._from_config(config).parameters())
    if size > LARGEST_MODEL:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    pair = Pair(cls, config)
    before = made_calls()
    words = checks(pair)
    row = {"class": cls.__name__, "calls": made_calls() - before, "checks": words,
           "inputs": sorted(pair.arguments), "status": "same"}
    refusals = [word.removeprefix("refused: ") for word in words.values()
                if word.startswith("refused: ")]
    if not row["calls"]:
        refusals += pair.refusals
    wrong = [f"{name} {word}" for name, word in words.items()
             if word.startswith(("different", "error"))]
    if wrong:
        row.update(status="different", reason="; ".join(wrong))
    elif refusals:
        row.update(status="refused", reason=refusals[0])
    elif not row["calls"]:
        row.update(status="not called", reason="no call of mha's function")
    return row


def work(name, connection):
    import resource  # of systems with fork

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    torch.set_num_threads(1)
    started = time.monotonic()
    row = row_of(name)
    connection.send({"name": name, **row, "seconds": round(time.monotonic() - started, 1)})


def sweep(wanted):
    """Rows, as they come: each model in a process of its own."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    compat.register()
    count_calls()
    context = multiprocessing.get_context("fork")  # torch is imported once
    waiting, running = list(wanted)[::-1], {}
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            name = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(name, sender))
            process.start()
            sender.close()
            running[receiver] = name, process, time.monotonic() + 4 * SECONDS
        ready = multiprocessing.connection.wait(running, timeout=1)
        for receiver, (name, process, until) in list(running.items()):
            if receiver not in ready and time.monotonic() < until:
                continue
            row = {"name": name, "status": "crash", "reason": f"took longer than {4 * SECONDS} s"}
            if receiver in ready:
                try:
                    row = receiver.recv()
                except EOFError:
                    process.join()
                    row["reason"] = f"its process ended with {process.exitcode}"
            process.kill()
            process.join()
            receiver.close()
            del running[receiver]
            yield row


def shares(rows):
    """Of all models those that "eager" runs, and of these those in which mha was called."""
    eager = [row for row in rows if row["status"] in RAN]
    return len(eager) / len(rows), sum(row.get("calls", 0) > 0 for row in eager) / len(eager)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="of models; all without any")
    parser.add_argument("--json", type=Path, help="all that was found; with names, what was"
                        " found of other models before stays")
    parser.add_argument("--table", type=Path, help="the page of the documentation")
    options = parser.parse_args()
    denominator = names()
    unknown = set(options.names) - set(denominator)
    if unknown:
        parser.error(f"NAME: got {', '.join(sorted(unknown))}, wanted some of {len(denominator)}")
    wanted = options.names or denominator
    rows = list(tqdm(sweep(wanted), total=len(wanted), unit="model"))
    if options.names and options.json and options.json.exists():
        rows += [row for row in json.loads(options.json.read_text(encoding="utf-8"))
                 if row["name"] not in options.names]
    rows.sort(key=lambda row: row["name"])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.table:
        write_table(options.table, rows, WINDOW, shares(rows))
    wrong = [row for row in rows if row["status"] in ("different", "crash")]
    for row in wrong:
        print(f"{row['name']}: {row['status']}: {row['reason']}")
    eager, called = shares(rows)
    print(f'{len(rows)} models: "eager" runs {eager:.1%}, mha was called in {called:.1%} of those,'
          f" {len(wrong)} differ or end their process")
    too_few = len(rows) == len(denominator) and (eager < EAGER_RUNS or called < MHA_CALLED)
    raise SystemExit(bool(wrong or too_few))


if __name__ == "__main__":
    main()

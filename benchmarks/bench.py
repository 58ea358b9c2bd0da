"""mha and its peers side by side, `make bench`: writes results_<kernels>_<maker>.md and .png.

Each library runs in a process of its own for 1 and for 2 threads, pinned to as many CPUs. All are
stopped (SIGSTOP) but the one being timed, because idle thread pools spin and would steal its CPUs.
Rounds are interleaved: in each round every library runs each piece of work once, and ratios are
taken within a round.

    python benchmarks/bench.py [--rounds 11] [--only causal] [--peers numpy,pytorch] [--isa avx2]
"""

import argparse
import importlib.metadata
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import machine
import numpy as np
import peers.numpy as numpy_peer
import report
from page import machine_name
from process import Process
from tqdm import tqdm
from works import PEERS, WORKS, Work

import mha

HERE = Path(__file__).parent


def reference_of(work, folder):
    """The path of a file with the work's result in float64, by plain NumPy; None with dropout,
    which no two libraries draw alike, and for a model, whose losses `make test-peers` compares."""
    if work.dropout or work.kind == "model":
        return None
    arrays = {name: array if array.dtype == bool else array.astype(np.float64)
              for name, array in work.arrays().items()}
    path = Path(folder) / "wanted.npy"
    if work.gradients:
        inputs = (arrays[name] for name in ("query", "key", "value"))
        _, pullback = mha.reference.scaled_dot_product_attention_vjp(*inputs, causal=work.causal)
        np.save(path, pullback(arrays["grad_output"])["query"])
    else:
        np.save(path, numpy_peer.to_numpy(numpy_peer.prepare(work, arrays, 1)[""]()))
    return str(path)


def measure(number, cpus, processes, rounds, isa, wanted):
    """Times of every library and variant, with the machine's own rates of each round; `wanted` is
    the path of the result that they have to show."""
    work, threads = WORKS[number], len(cpus)
    entries, wrong = [], {}
    for process in processes:
        if process.peer != "mha" and process.peer not in work.peers:
            continue
        answer = process.ask(do="prepare", work=asdict(work), threads=threads, wanted=wanted)
        entries += [(process, variant) for variant in answer["variants"]]
        for variant, reason in answer["wrong"].items():
            wrong[f"{process.peer} {variant}".strip()] = reason
    seconds = {(process.peer, variant): [] for process, variant in entries}
    rates = []
    for round_number in range(rounds):
        rates.append(machine.read_rate(cpus, work.bytes_read) if work.reads
                     else machine.fma_rate(cpus, isa, work.dtype))
        turned = entries[round_number % len(entries):] + entries[:round_number % len(entries)]
        for process, variant in turned:
            answer = process.ask(do="time", variant=variant, seconds=0.04)
            seconds[process.peer, variant].append(answer["seconds"])
    return report.Measurement(number, threads, seconds, rates, wrong)


LONG = Work("1x8x16384x64", "attention", (1, 8, 16384, 16384, 64), {})


def memory_of(peers, cpus):
    """peer -> bytes that one long attention takes beyond its inputs, its output included."""
    taken = {}
    for peer in tqdm(peers, desc="memory", unit="peer"):
        process = Process(peer, cpus, "")
        try:
            short = {**asdict(LONG), "shape": (1, 8, 256, 256, 64)}
            variant = process.ask(do="prepare", work=short, threads=len(cpus))["variants"][0]
            process.ask(do="time", variant=variant, seconds=0.01)  # threads, code, workspaces
            process.ask(do="prepare", work=asdict(LONG), threads=len(cpus))
            taken[peer] = process.ask(do="memory")["bytes"]
        except RuntimeError:
            taken[peer] = None
        finally:
            process.end()
    return taken


def run(arguments):
    isa = arguments.isa or mha.instruction_set()
    cpus = sorted(os.sched_getaffinity(0))[:2]
    peers = list(dict.fromkeys(["mha", *arguments.peers.split(",")]))
    numbers = [number for number, work in enumerate(WORKS) if arguments.only in work.name]
    measurements = []
    thread_counts = [int(count) for count in arguments.threads.split(",")]
    total = len(numbers) * len(thread_counts)
    with tempfile.TemporaryDirectory() as folder, \
            tqdm(total=total, desc="measuring", unit="work") as progress:
        for threads in thread_counts:
            processes = [Process(peer, cpus[:threads], arguments.isa) for peer in peers]
            try:
                for number in numbers:
                    progress.set_postfix_str(f"{WORKS[number].name}, {threads} threads")
                    wanted = reference_of(WORKS[number], folder)
                    measurements.append(measure(number, cpus[:threads], processes,
                                                arguments.rounds, isa, wanted))
                    tqdm.write(report.summary(measurements[-1]))
                    progress.update()
            finally:
                for process in processes:
                    process.end()
    return measurements, isa


def versions():
    names = ("mha", "numpy", "torch", "onnxruntime", "jax", "openvino")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="work whose name contains this")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--isa", default="", help="limit mha and PyTorch to avx2")
    parser.add_argument("--write", action="store_true", help="write the page and its picture")
    arguments = parser.parse_args()
    measurements, isa = run(arguments)
    if arguments.write:
        # NumPy and JAX would hold 17 GB of scores.
        taken = memory_of(["mha", "pytorch", "onnxruntime", "openvino"],
                          sorted(os.sched_getaffinity(0))[:2])
        report.write(measurements, isa, HERE, machine_name(), versions(), taken)


if __name__ == "__main__":
    main()

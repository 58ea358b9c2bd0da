"""What attention on Dask costs beyond attention: `make bench-dask`, an idle machine, some minutes.

    tasks    attention in parts, causal, by a plain loop and by one worker: what a task adds
    workers  two worker processes against one, each pinned to its CPU; beside them two plain
             processes that share the same parts
    threads  Dask's own threads, each part on its share of the cores; and on all of them
    memory   of a worker, as keys become more
    writing  a graph of 100,000 tasks
    many     4 to 256 workers, simulated from the seconds and bytes a task: dask_simulation.py

    python benchmarks/dask_scaling.py [--rounds 5] [--write]

--write: dask_scaling.md and dask_scaling.png. Source of the plain loop: Dao et al. 2023,
"Flash-Decoding".
"""

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import dask
import dask.array as da
import dask_simulation
import numpy as np
from distributed import Client, LocalCluster, wait
from tqdm import tqdm

import mha
import mha.dask
from mha.dask import _tasks as tasks

HERE = Path(__file__).parent
HEADS, HEAD_DIM, CHUNK = 8, 64, 4096
SETTINGS = {"distributed.worker.memory.target": False, "distributed.worker.memory.spill": False,
            "distributed.worker.memory.pause": False, "distributed.admin.log-length": 0}


def pin(cpu):
    """All threads of this process, and those to come."""
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {cpu})


def cluster_of(cpus, memory="8GB"):
    """A worker process of one thread on each of these CPUs, and its client."""
    cluster = LocalCluster(n_workers=len(cpus), threads_per_worker=1, memory_limit=memory,
                           dashboard_address=None, silence_logs=50)
    client = Client(cluster)
    pin_workers(client, cpus)
    return cluster, client


def pin_workers(client, cpus):
    for address, cpu in zip(sorted(client.scheduler_info()["workers"]), cpus):
        client.run(pin, cpu, workers=[address])


def chunk_of(number, row):
    """Query, key or value: random, and the same wherever it is made."""
    rng = np.random.default_rng([number, row])
    return rng.standard_normal((HEADS, CHUNK, HEAD_DIM), np.float32)


def plain_loop(rows, chunks):
    """These rows of chunks, in parts and joined, without any scheduler; seconds."""
    key, value = ([chunk_of(number, row) for row in range(chunks)] for number in (1, 2))
    queries = {row: chunk_of(0, row) for row in rows}
    begin = time.perf_counter()
    with mha.threads(1):
        for row, query in queries.items():
            parts = [mha.scaled_dot_product_attention(
                query, key[j], value[j], causal=True, query_offset=CHUNK * (row - j),
                return_lse=True) for j in range(row + 1)]
            if len(parts) > 1:
                mha.merge_attention(*zip(*parts, strict=True))
    return time.perf_counter() - begin


def plain_process(cpu, rows, chunks, barrier, seconds):
    pin(cpu)
    plain_loop(rows[:1], chunks)
    barrier.wait()
    seconds.put(plain_loop(rows, chunks))


def plain_processes(cpus, chunks):
    """Seconds until the last of several pinned processes has its share of the rows."""
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(len(cpus)), context.Queue()
    shares = balanced(range(chunks), len(cpus))
    processes = [context.Process(target=plain_process, args=(cpu, share, chunks, barrier, seconds))
                 for cpu, share in zip(cpus, shares)]
    for process in processes:
        process.start()
    slowest = max(seconds.get() for _ in processes)
    for process in processes:
        process.join()
    return slowest


def balanced(rows, count):
    """Row i costs i + 1: the largest first, each to whoever has the least."""
    shares = [[] for _ in range(count)]
    for row in sorted(rows, reverse=True):
        min(shares, key=lambda share: sum(share) + len(share)).append(row)
    return shares


def on_workers(client, chunks):
    """Seconds of the same on workers whose memory holds query, key and value already."""
    arrays = [da.concatenate([
        da.from_delayed(dask.delayed(chunk_of, pure=True)(number, row), (HEADS, CHUNK, HEAD_DIM),
                        np.float32)[None] for row in range(chunks)], axis=2)
        for number in range(3)]
    arrays = client.persist(arrays)
    wait(arrays)
    output = mha.dask.scaled_dot_product_attention(*arrays, causal=True)
    begin = time.perf_counter()
    futures = client.persist(output)
    wait(futures)
    return time.perf_counter() - begin


def measure_workers(chunks, rounds):
    """name -> seconds of each round: plain and on workers, on one CPU and on two."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    clusters = {count: cluster_of(cpus[:count]) for count in (1, len(cpus))}
    times = {}
    for number in tqdm(range(rounds + 1), unit="round"):
        for count, (_, client) in clusters.items():
            client.restart()
            pin_workers(client, cpus)
            found = {f"plain {count}": plain_processes(cpus[:count], chunks),
                     f"workers {count}": on_workers(client, chunks)}
            for name, seconds in found.items():
                if number:  # the first round warms up
                    times.setdefault(name, []).append(seconds)
    for cluster, client in clusters.values():
        client.close()
        cluster.close()
    return times


def measure_threads(rounds, length=16_384):
    """name -> seconds of each round of one attention on two of Dask's threads: mha's threads in a
    task are its share, 1, or all there are, 2; and by one call on 2."""
    x = np.random.default_rng(0).standard_normal((HEADS, length, HEAD_DIM), np.float32)
    cut = da.from_array(x, chunks=(HEADS, CHUNK // 2, HEAD_DIM))
    output = mha.dask.scaled_dot_product_attention(cut[None], cut[None], cut[None])
    share, times = tasks.share_of_cores, {}
    for number in range(rounds + 1):
        for name, threads in (("its share", share), ("all", lambda: 2), ("one call", None)):
            tasks.share_of_cores = threads
            begin = time.perf_counter()
            if threads is None:
                mha.scaled_dot_product_attention(x[None], x[None], x[None])
            else:
                output.compute(scheduler="threads", num_workers=2)
            if number:
                times.setdefault(name, []).append(time.perf_counter() - begin)
    tasks.share_of_cores = share
    return times


def worker_memory(dask_worker):
    return dask_worker.monitor.proc.memory_info().rss


def measure_memory(key_lens, queries=1000, key_chunk=10_000):
    """key_len -> (before, at most) bytes of the one worker that attends 1,000 queries to them."""
    found = {}
    for key_len in key_lens:
        with dask.config.set(SETTINGS):
            cluster, client = cluster_of(sorted(os.sched_getaffinity(0))[:1])
        random = da.random.default_rng(0)
        query = random.random((HEADS, queries, HEAD_DIM), np.float32, chunks=-1)[None]
        key, value = (random.random((HEADS, key_len, HEAD_DIM), np.float32,
                                    chunks=(HEADS, key_chunk, HEAD_DIM))[None]
                      for _ in "kv")
        mha.dask.scaled_dot_product_attention(query, key[:, :, :64], value[:, :, :64]).compute()
        (before,) = client.run(worker_memory).values()
        future = client.compute(mha.dask.scaled_dot_product_attention(query, key, value))
        most = before
        while not future.done():
            most = max(most, *client.run(worker_memory).values())
            time.sleep(0.005)
        future.result()
        found[key_len] = before, most
        client.close()
        cluster.close()
    return found


def measure_writing():
    """(tasks, seconds) of a graph of at least 100,000 tasks."""
    x = da.zeros((1, 1, 317 * 8, 4), chunks=(1, 1, 8, 4))
    output = mha.dask.scaled_dot_product_attention(x, x, x)
    begin = time.perf_counter()
    tasks = dict(output.__dask_graph__())
    return len(tasks), time.perf_counter() - begin


def measure_scheduler(client, count=3000):
    """(seconds that the scheduler computes, seconds that pass) for a task of next to nothing: the
    first is what it can hand out, since it lives in this process; in the second, it and a worker
    wait for each other's messages."""
    client.compute(da.ones(count, chunks=1).sum()).result()
    graph = da.ones(count + 1, chunks=1).map_blocks(np.negative).sum()
    tasks = len(dict(graph.__dask_graph__()))
    begin, computing = time.perf_counter(), time.process_time()
    client.compute(graph, optimize_graph=False).result()
    return (time.process_time() - computing) / tasks, (time.perf_counter() - begin) / tasks


def parts_of_rounds(chunks, times):
    """Seconds of one part whose pairs are all seen; those on the diagonal cost half."""
    full = chunks * (chunks - 1) / 2 + chunks / 2
    return statistics.median(times["plain 1"]) / full


def report(chunks, rounds, times, threads, memory, writing, per_task, key_chunk=10_000):
    median = {name: statistics.median(values) for name, values in times.items()}
    parts = chunks * (chunks + 1) // 2
    plain, workers = (median[f"{kind} 1"] / median[f"{kind} 2"] for kind in ("plain", "workers"))
    overhead = median["workers 1"] / median["plain 1"] - 1
    chunk_bytes = 4 * HEADS * CHUNK * HEAD_DIM
    lines = [
        f"{mha.instruction_set()}; {rounds} rounds in turns, medians. {chunks} chunks of {CHUNK}"
        f" queries and keys x {HEADS} heads x {HEAD_DIM}, causal: {parts} parts. A part reads"
        f" {3 * chunk_bytes / 1e6:.1f} MB and writes {chunk_bytes / 1e6 + 4e-6 * HEADS * CHUNK:.1f}"
        " MB.", "",
        "| | 1 CPU | 2 CPUs | times as fast |", "|---|---|---|---|",
        f"| plain processes | {median['plain 1']:.2f} s | {median['plain 2']:.2f} s |"
        f" {plain:.2f} |",
        f"| workers | {median['workers 1']:.2f} s | {median['workers 2']:.2f} s |"
        f" {workers:.2f} |", "",
        f"Workers gain {100 * workers / plain:.0f} % of what plain processes gain. A task costs"
        f" {100 * overhead:.1f} % more on a worker than in the loop. An empty task takes the"
        f" scheduler {1e3 * per_task[0]:.2f} ms, and {1e3 * per_task[1]:.2f} ms until the next one"
        " runs.", "",
        "| two of Dask's threads, mha's threads in a task | seconds |", "|---|---|",
        *(f"| {name} | {statistics.median(seconds):.2f} |" for name, seconds in threads.items()),
        "",
        f"| keys, in chunks of {key_chunk:,}; 1,000 queries | worker before | at most | more |",
        "|---|---|---|---|",
        *(f"| {key_len:,} | {before / 1e6:.0f} MB | {most / 1e6:.0f} MB |"
          f" {(most - before) / 1e6:.0f} MB |" for key_len, (before, most) in memory.items()), "",
        f"A chunk of keys and its values are {8e-6 * HEADS * key_chunk * HEAD_DIM:.0f} MB.", "",
        f"{writing[0]:,} tasks are written in {writing[1]:.1f} s."]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--key-lens", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--write", action="store_true",
                        help="write dask_scaling.md, .json and .png")
    arguments = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.ERROR)
    writing = measure_writing()
    with dask.config.set(SETTINGS):
        cluster, client = cluster_of(sorted(os.sched_getaffinity(0))[:1])
        per_task = measure_scheduler(client)
        client.close()
        cluster.close()
        times = measure_workers(arguments.chunks, arguments.rounds)
    threads = measure_threads(arguments.rounds)
    memory = measure_memory(arguments.key_lens)
    measured = {"part_seconds": parts_of_rounds(arguments.chunks, times),
                "scheduler_seconds": per_task[0], "chunk_bytes": 4 * HEADS * CHUNK * HEAD_DIM}
    figures = report(arguments.chunks, arguments.rounds, times, threads, memory, writing, per_task)
    text = ("# Attention on Dask\n\nBy `make bench-dask`. What it says:"
            " [docs/dask.md](../docs/dask.md).\n\n"
            f"{figures}\n\n{dask_simulation.report(measured)}\n")
    print(text)
    if arguments.write:
        (HERE / "dask_scaling.md").write_text(text)
        (HERE / "dask_scaling.json").write_text(json.dumps(measured, indent=1) + "\n")
        dask_simulation.chart(measured, HERE / "dask_scaling.png")


if __name__ == "__main__":
    main()

"""One library in a process of its own. Reads commands, a line of JSON each, and answers each with a
line of JSON:

    {"do": "prepare", "work": {fields of a Work}, "threads": 2, "wanted": "path.npy"}
                                                 -> {"variants": [...], "wrong": {...}}
    {"do": "time", "variant": "SDPA", "seconds": 0.05}   -> {"seconds": median of the calls}

A variant whose result is wrong, or that fails, is named with the reason and not measured.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from works import Work


class Runner:
    def __init__(self, peer):
        self.peer = importlib.import_module(f"peers.{peer}")
        self.calls = {}

    def prepare(self, work, threads, wanted=None):
        """`work`: the fields of a Work. `wanted`: the path of its result; without one nothing is
        called yet."""
        work = Work(**work)
        arrays = work.arrays()
        self.calls, wrong = {}, {}
        try:
            calls = self.peer.prepare(work, arrays, threads)
        except Exception as error:  # an unsupported work is a result, too
            return {"variants": [], "wrong": {"": f"{type(error).__name__}: {error}"[:200]}}
        if wanted is None:
            self.calls = calls
            return {"variants": list(calls), "wrong": wrong}
        wanted = np.load(wanted)
        for variant, call in calls.items():
            try:
                result = np.asarray(self.peer.to_numpy(call()))
                if result.shape != wanted.shape and result.size == wanted.size:
                    result = result.reshape(work.shape[0], -1, work.shape[1],
                                            work.shape[4]).swapaxes(1, 2)
                error = float(np.abs(result - wanted).max() / np.abs(wanted).max())
            except Exception as failure:
                wrong[variant] = f"{type(failure).__name__}: {failure}"[:200]
                continue
            if error > 1e-4:
                wrong[variant] = f"error {error:.1e}"
                continue
            self.calls[variant] = call
        return {"variants": list(self.calls), "wrong": wrong}

    def memory(self):
        """By how many bytes the process grows at most during one call (Linux)."""

        def status(name):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith(name):
                    return 1024 * int(line.split()[1])
            raise RuntimeError(f"/proc/self/status has no {name}")

        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = status("VmRSS")
        next(iter(self.calls.values()))()
        return {"bytes": status("VmHWM") - before}

    def time(self, variant, seconds):
        """The median call of a stretch of `seconds`, after calls that bring caches and threads
        back to life."""
        call = self.calls[variant]
        begin = time.perf_counter()
        call()
        once = time.perf_counter() - begin
        warm_until = begin + min(0.3 * seconds, 10 * once)
        while time.perf_counter() < warm_until:
            call()
        times = []
        until = time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return {"seconds": float(np.median(times))}


def main():
    answers = os.fdopen(os.dup(1), "w")  # libraries that print shall not break the protocol
    os.dup2(2, 1)
    runner = Runner(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(runner, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

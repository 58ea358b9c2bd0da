"""A library in a process of its own, pinned to CPUs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Of the environment of processes whose results' memory is kept: pages new from the system would
# cost more than many a call.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}


class Process:
    """A runner.py, stopped but while it is asked something; in another Python, one of another
    build of mha."""

    def __init__(self, peer, cpus, isa, python=sys.executable):
        threads = str(len(cpus))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
                       "OPENBLAS_NUM_THREADS": threads, "MHA_NUM_THREADS": threads,
                       "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE)}
        if len(cpus) == 1:
            environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        if isa:
            environment["MHA_ISA"] = isa
            environment["ATEN_CPU_CAPABILITY"] = isa
            environment["MKL_ENABLE_INSTRUCTIONS"] = isa.upper()
        self.peer = peer
        self.process = subprocess.Popen(
            [python, str(HERE / "runner.py"), peer], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, set(cpus)))

    def ask(self, **command):
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        self.process.send_signal(signal.SIGSTOP)
        if not answer:
            raise RuntimeError(f"the process of {self.peer} ended: run "
                               f"`python benchmarks/runner.py {self.peer}` to see why")
        return json.loads(answer)

    def end(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

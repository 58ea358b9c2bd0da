"""Runs a command, and says so whenever it has printed nothing for 15 s. Started by the Makefile.

    python tests/tools/tell_progress.py "building mha (usually a minute)" COMMAND ARGUMENT ...
"""

import os
import select
import signal
import subprocess
import sys
import time

SILENCE = 15  # seconds


def say(text):
    print(f"make: {text}", flush=True)


def forward(child, started):
    """What the child prints, until it ends: processes that it leaves behind may go on printing."""
    in_a_line = False
    while True:
        if select.select([child.stdout], [], [], SILENCE)[0]:
            data = os.read(child.stdout.fileno(), 65536)
            if not data:
                return
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            in_a_line = not data.endswith(b"\n")
        elif child.poll() is not None:
            return
        else:
            if in_a_line:
                print()
            say(f"goes on, {time.monotonic() - started:.0f} s so far")
            in_a_line = False


def run(what, *command):
    say(what)
    started = time.monotonic()
    environment = dict(os.environ)
    if sys.stdout.isatty():
        environment.setdefault("PY_COLORS", "1")  # pytest's, which sees no terminal
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment,
                             close_fds=False)  # make has some of its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the child's, too: it says what comes
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    forward(child, started)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))

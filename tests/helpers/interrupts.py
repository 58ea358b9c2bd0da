"""Something that happens at every place of a call, one after the other: a change, or Ctrl-C."""

import functools
import itertools
import linecache
import sys

LAYER_FILES = ("mha._layer.layer", "mha._layer.options", "mha._layer.own_parameters",
               "mha._layer.settings", "mha._layer.state", "mha.reference")


class Interrupted:
    """A trace function: interrupt() at one step, an "opcode", "line" or "call", of the files."""

    def __init__(self, step, position, interrupt, files, passed_over):
        self.step, self.position, self.interrupt = step, position, interrupt
        self.files, self.passed_over = files, passed_over
        self.steps = 0

    def __call__(self, frame, event, argument):
        if frame.f_globals.get("__name__") not in self.files:
            return None
        frame.f_trace_opcodes = self.step == "opcode"
        if event == self.step and not self.passed_over(frame):
            self.steps += 1
            if self.steps == self.position + 1:
                self.interrupt()
        return self


def at_every(step, function, interrupt, make, files=LAYER_FILES, passed_over=lambda frame: False,
             first=0, every=1):
    """Yields (made, function(made)) for what make() made, with interrupt(made) at the first step,
    at the second and so on; or at fewer of them."""
    for position in itertools.count(first, every):
        made = make()
        trace = Interrupted(step, position, functools.partial(interrupt, made), files, passed_over)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            result = function(made)
        finally:
            sys.settrace(before)
        if trace.steps <= position:
            assert position > 5
            return
        yield made, result


def interrupts_of(call, make, step="line"):
    """Yields what make() made, after call(made) with Ctrl-C at the first step in mha, at the second
    and so on, and last of all without."""
    def run(made):
        try:
            call(made)
        except KeyboardInterrupt:
            return

    files = {name for name in sys.modules if name.split(".")[0] == "mha"}
    for made, _ in at_every(step, run, _control_c, make, files, _is_with):
        yield made
    made = make()
    call(made)
    yield made


def _control_c(made):
    raise KeyboardInterrupt


def _is_with(frame):
    """A tracer comes between the body of `with` and its end, where Python itself does not."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")

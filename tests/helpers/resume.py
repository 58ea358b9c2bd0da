"""A pytest plugin: a run that was stopped goes on with the tests that have not passed yet.

`PYTHONPATH=tests/helpers RESUME_FILE=done.jsonl python -m pytest -p resume ...` writes one line a
test into
that file when it has ended, [its name, its outcome, its seconds], and leaves out those that have
one and did not fail.
"""

import json
import os
from pathlib import Path

import pytest

WORST = ("passed", "skipped", "failed")


class Resume:
    def __init__(self, path):
        self.path = path
        self.ended = self.read()
        self.reports = {}

    def read(self):
        if not self.path.exists():
            return set()
        *lines, cut_off = self.path.read_text().split("\n")
        if cut_off:
            self.path.write_text("".join(line + "\n" for line in lines))
        outcomes = {name: outcome for name, outcome, _ in map(json.loads, lines)}
        return {name for name, outcome in outcomes.items() if outcome != "failed"}

    def pytest_collection_modifyitems(self, config, items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.ended])
        items[:] = [item for item in items if item.nodeid not in self.ended]

    def pytest_runtest_logreport(self, report):
        reports = self.reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when == "teardown":
            outcome = max((one.outcome for one in reports), key=WORST.index)
            seconds = sum(one.duration for one in reports)
            with self.path.open("a") as file:
                file.write(json.dumps([report.nodeid, outcome, round(seconds, 3)]) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.ended:
            session.exitstatus = pytest.ExitCode.OK  # all of them had ended


def pytest_configure(config):
    config.pluginmanager.register(Resume(Path(os.environ["RESUME_FILE"])))

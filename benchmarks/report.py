"""From measurements to a page and its picture: results_avx2_amd.md and .png on an AMD of AVX2."""

import math
import re
from dataclasses import dataclass

import numpy as np
from works import PEERS, WORKS


@dataclass
class Measurement:
    number: int  # in WORKS
    threads: int
    seconds: dict  # (peer, variant) -> seconds of each round
    rates: list  # of the machine in each round: bytes or operations a second
    wrong: dict  # what was not measured -> why

    @property
    def work(self):
        return WORKS[self.number]

    @property
    def ours(self):
        return np.array(self.seconds["mha", ""])

    def ratios(self, peer):
        """Peer's time / ours of each round, by the peer's fastest variant; None if it has none."""
        variants = [key for key in self.seconds if key[0] == peer and self.seconds[key]]
        if not variants:
            return None
        fastest = min(variants, key=lambda key: np.median(self.seconds[key]))
        return np.array(self.seconds[fastest]) / self.ours

    def best_peer(self):
        """The fastest peer but NumPy, or None."""
        peers = {key[0] for key in self.seconds} - {"mha", "numpy"}
        return min(peers, key=lambda peer: np.median(self.ratios(peer)), default=None)

    @property
    def fraction(self):
        """Of what the machine can do: of its read rate or of its FMA rate."""
        amount = self.work.bytes_read if self.work.reads else self.work.operations
        return np.median(amount / self.ours / np.array(self.rates))


def spread(ratios):
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def wanted_and_got(measurement):
    """(what, wanted, got) for each figure that the work has to show."""
    work = measurement.work
    for peer, wanted in work.wanted.items():
        name = measurement.best_peer() if peer == "best" else peer
        ratios = None if name is None else measurement.ratios(name)
        if ratios is not None:
            yield f"best: {name}" if peer == "best" else name, wanted, float(np.median(ratios))
    if work.reads:
        yield "read rate", work.reads[measurement.threads > 1], float(measurement.fraction)
    if work.of_peak:
        yield "FMA rate", work.of_peak, float(measurement.fraction)


def summary(measurement):
    """One line for the terminal."""
    ours = np.median(measurement.ours)
    parts = [f"{measurement.work.name}, {measurement.threads} threads: {1e3 * ours:.3f} ms",
             f"{100 * measurement.fraction:.0f} %"]
    for key, times in measurement.seconds.items():
        if key[0] != "mha" and times:
            name = " ".join(key).strip()
            parts.append(f"{name} {np.median(np.array(times) / measurement.ours):.2f}")
    missed = [f"{what} {rounded_down(got)} < {wanted}"
              for what, wanted, got in wanted_and_got(measurement)
              if got < wanted]
    if missed:
        parts.append("MISSED " + ", ".join(missed))
    for what, why in measurement.wrong.items():
        parts.append(f"not measured: {what} ({why})")
    return " | ".join(parts)


def rounded_down(got):
    """With two decimals, and never up to the figure that it misses."""
    return f"{math.floor(100 * got) / 100:.2f}"


def table(measurements, threads):
    heads = ["work", "mha", "GFLOP/s", "of the machine", *PEERS.values(), "aim", "met"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for m in measurements:
        if m.threads != threads:
            continue
        cells = [m.work.name, f"{1e3 * np.median(m.ours):.3f} ms",
                 f"{m.work.operations / np.median(m.ours) * 1e-9:.1f}",
                 f"{100 * m.fraction:.0f} % of {'reading' if m.work.reads else 'FMA'}"]
        for peer in PEERS:
            ratios = m.ratios(peer)
            cells.append("" if ratios is None else spread(ratios))
        figures = list(wanted_and_got(m))
        cells.append(", ".join(f"{what} {wanted:g}" for what, wanted, _ in figures))
        missed = [f"{what} {rounded_down(got)}" for what, wanted, got in figures if got < wanted]
        cells.append("yes" if not missed else "no: " + ", ".join(missed))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def scaling(measurements):
    """Ours at 1 thread / ours at 2 threads, for what takes more than 2 ms."""
    lines = ["| work | 1 thread | 2 threads | ratio |", "|---|---|---|---|"]
    one = {m.number: np.median(m.ours) for m in measurements if m.threads == 1}
    for m in measurements:
        if m.threads == 2 and one.get(m.number, 0) > 2e-3 and not m.work.reads:
            two = np.median(m.ours)
            lines.append(f"| {m.work.name} | {1e3 * one[m.number]:.2f} ms | {1e3 * two:.2f} ms | "
                         f"{one[m.number] / two:.2f} |")
    return "\n".join(lines)


def chart(measurements, path):
    """Ratios to each peer, a row a work, one panel for each number of threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({m.threads for m in measurements})
    figure, axes = pyplot.subplots(1, len(counts), figsize=(7.2 * len(counts), 9), sharey=True,
                                   squeeze=False, layout="constrained")
    colors = dict(zip(PEERS, ("tab:gray", "tab:red", "tab:blue", "tab:purple", "tab:cyan")))
    for axis, threads in zip(axes[0], counts):
        rows = [m for m in measurements if m.threads == threads][::-1]
        for peer, color in colors.items():
            points = [(np.median(m.ratios(peer)), row) for row, m in enumerate(rows)
                      if m.ratios(peer) is not None]
            if points:
                axis.scatter(*zip(*points), color=color, label=PEERS[peer], s=36)
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        axis.set_xticks([], minor=True)
        axis.set_yticks(range(len(rows)), [m.work.name for m in rows])
        axis.grid(axis="both", alpha=0.3)
        axis.set_title(f"{threads} thread{'s' if threads > 1 else ''}")
        axis.set_xlabel("peer's time / mha's time (right of 1: mha is faster)")
    figure.legend(*axes[0][-1].get_legend_handles_labels(), loc="outside lower center",
                  ncols=len(colors))
    figure.savefig(path, dpi=110)


def memory_table(taken):
    lines = ["| library | taken by the call |", "|---|---|"]
    for peer, size in taken.items():
        lines.append(f"| {peer} | " + ("failed |" if size is None else f"{size / 2**20:.0f} MiB |"))
    return "\n".join(lines)


def write(measurements, isa, folder, machine_name, versions, taken):
    counts = sorted({m.threads for m in measurements})
    maker = re.split(r"\W", machine_name)[0]  # AMD EPYC ..., Intel(R) Xeon(R) ...
    name = f"results_{isa}_{maker.lower()}"
    parts = [
        f"# Results, {isa}, {maker}\n",
        f"{machine_name}; kernels: {isa}. {versions}\n",
        "float32 unless named. A cell is the peer's time / mha's (above 1: mha is faster): the "
        "median of the rounds, and the 10th to 90th percentile. Peers run in processes of their "
        "own on the same CPUs, all but one stopped, rounds interleaved, in true float32, results "
        "checked to 1e-4 against float64. "
        "'of the machine' is the fraction of the FMA rate, or of the "
        "read rate where reading is the bound, measured in the same rounds. 'Aim' is what this "
        "project aims at for the row, 'best' the best of all peers but NumPy; what misses it is "
        "rounded down. A fraction above 100 %, or two threads more than twice as fast as one, says "
        "that the machine's speed changed while it was measured.\n",
        f"![ratios]({name}.png)\n",
    ]
    for threads in counts:
        parts += [f"## {threads} thread{'s' if threads > 1 else ''}\n",
                  table(measurements, threads) + "\n"]
    if len(counts) > 1:
        parts += ["## Two threads against one\n", scaling(measurements) + "\n"]
    wrong = {f"{what}, {m.work.name}: {why}" for m in measurements
             for what, why in m.wrong.items()}
    if wrong:
        parts += ["## Not measured\n", "\n".join(f"- {line}" for line in sorted(wrong)) + "\n"]
    parts += ["## Memory of attention 1x8x16384x64\n",
              "What the process's peak grows by in one call, the output of 32 MiB included; the "
              "scores alone would be 8 GiB.\n", memory_table(taken) + "\n"]
    (folder / f"{name}.md").write_text("\n".join(parts))
    chart(measurements, folder / f"{name}.png")

"""Measures tfpar and its peers in one interleaved run.

    python -m bench                                # everything: some minutes
    python -m bench --workloads=tiny --peers="plain,tfpar data=4"
    python -m bench --json=bench.json --markdown   # for machines, for the README

Every peer trains in a process of its own, in one `fit` over a repeated dataset whose epochs are
short blocks of steps. The parent asks the peers for a block each in turn, never two at once, round
after round: noise of the machine hits all of them alike. A step's time is the median of the blocks;
the first step's is that of a whole `fit` of one step, with tracing and compilation; the memory is
the high-water mark of the process, the interpreter and its libraries included.
"""

import json
import multiprocessing
import os
import platform
import sys
import tempfile
from importlib import metadata

from absl import app, flags

from bench import report, worker
from bench.peers import ALL, PEERS
from bench.workloads import WORKLOADS

flags.DEFINE_list(
    "workloads", ["transformer", "mlp", "tiny"], f"What to train, of: {', '.join(WORKLOADS)}."
)
flags.DEFINE_list("peers", list(PEERS), f"Who trains, of: {', '.join(ALL)}.")
flags.DEFINE_integer("blocks", 9, "Timed blocks of each peer.", lower_bound=1)
flags.DEFINE_integer("steps", None, "Steps in a block; default by workload.", lower_bound=1)
flags.DEFINE_bool("batch_hooks", False, "With a callback on every batch, as a progress bar has.")
flags.DEFINE_integer("timeout", 300, "Seconds after which a silent peer has failed.", lower_bound=1)
flags.DEFINE_string("json", None, "Writes all figures to this file.")
flags.DEFINE_bool("markdown", False, "Prints the tables in Markdown.")
flags.DEFINE_bool("quick", False, "Two short blocks: shows that everything runs.")
FLAGS = flags.FLAGS

WARM_UP = 2  # blocks before the timed ones


class PeerFailed(RuntimeError):
    """A peer's process ended, or was silent for too long; the message has the end of its log."""


class Process:
    """A peer at work on one workload in a process of its own."""

    def __init__(self, peer, workload, steps, folder):
        self.peer = peer
        self.log = os.path.join(folder, f"{workload}-{peer}.log")
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=worker.serve,
            args=(theirs, peer, workload, steps, FLAGS.batch_hooks, self.log),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.receive()

    def ask(self, what):
        try:
            self.connection.send(what)
        except BrokenPipeError:
            raise PeerFailed(self.last_words()) from None
        return self.receive()

    def receive(self):
        try:
            if self.connection.poll(FLAGS.timeout):
                return self.connection.recv()
        except EOFError:
            self.process.join(10)
        raise PeerFailed(self.last_words())

    def last_words(self):
        state = "was silent too long" if self.process.is_alive() else "ended"
        with open(self.log, errors="replace") as log:
            return f"{self.peer} {state}:\n" + "".join(log.readlines()[-15:])

    def end(self):
        self.process.kill()
        self.process.join()


def measure(workload, peers, blocks, steps, folder):
    """The rows of one workload and {peer: why it has none}."""
    raw, failed, processes = {}, {}, {}

    def turn(peer, what):
        try:
            return processes[peer].ask(what)
        except PeerFailed as error:
            failed[peer] = str(error)
            processes.pop(peer).end()
            return None

    try:
        for peer in peers:
            progress(f"{workload}: starting {peer}")
            try:
                processes[peer] = Process(peer, workload, steps, folder)
            except PeerFailed as error:
                failed[peer] = str(error)
                continue
            if answer := turn(peer, "block"):
                raw[peer] = {**answer, "blocks": []}
        for block in range(WARM_UP + blocks):
            progress(f"{workload}: block {block + 1} of {WARM_UP + blocks}")
            for peer in list(processes):
                answer = turn(peer, "block")
                if answer and block >= WARM_UP:
                    raw[peer]["blocks"].append(answer["block"])
        for peer in list(processes):
            if answer := turn(peer, "stop"):
                raw[peer].update(answer)
    finally:
        for process in processes.values():
            process.end()
    progress("")
    done = {peer: raw[peer] for peer in peers if peer in raw and peer not in failed}
    plain = done.get("plain")
    return [report.summary(workload, peer, done[peer], plain) for peer in done], failed


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def chosen(flag, names, known):
    """The names of a list flag, in the order of the known ones."""
    names = [name.strip() for name in names]
    for name in names:
        if name not in known:
            raise app.UsageError(f"--{flag} takes {', '.join(known)}; got {name!r}.")
    return [name for name in known if name in names]


def versions():
    found = {"python": platform.python_version()}
    for package in ("tensorflow", "keras", "jax"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Only flags are taken, got {argv[1:]}.")
    workloads = chosen("workloads", FLAGS.workloads, WORKLOADS)
    skipped = {}
    peers = []
    for peer in chosen("peers", FLAGS.peers, ALL):
        if why := ALL[peer].missing():
            skipped[peer] = why
            print(f"{peer}: skipped, {why}")
        else:
            peers.append(peer)

    rows, failures = [], {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for workload in workloads:
            steps = FLAGS.steps or WORKLOADS[workload].steps
            blocks = FLAGS.blocks
            if FLAGS.quick:
                steps, blocks = min(steps, 3), min(blocks, 2)
            found, failed = measure(workload, peers, blocks, steps, folder)
            print(report.table(workload, found, FLAGS.markdown), flush=True)
            for peer, why in failed.items():
                print(f"{workload}: {why}\n", flush=True)
                failures[f"{workload}, {peer}"] = why
            rows += found

    found = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    print(f"{report.NOTE} {os.cpu_count()} cores, {found}.")
    if FLAGS.json:
        with open(FLAGS.json, "w") as file:
            machine = {"cores": os.cpu_count(), **versions()}
            result = {
                "machine": machine,
                "batch_hooks": FLAGS.batch_hooks,
                "results": rows,
                "skipped": skipped,
                "failed": failures,
            }
            json.dump(result, file, indent=2)
    if failures:
        sys.exit(f"Failed: {'; '.join(failures)}.")


if __name__ == "__main__":
    app.run(main)

"""Walks the table of a schedule: one thread a rank, each working its own list in order.

What an action does, and what it needs, the driver is told; it knows of nothing but order, errors
and interrupts. A call that waits for a device lets the other threads run.
"""

import threading


class _Walk:
    """The state of a walk, shared by its threads."""

    def __init__(self, needs, perform):
        self.needs, self.perform = needs, perform
        self.done: set = set()
        self.error: BaseException | None = None
        self.stopped = False
        self.running = 0
        self.changed = threading.Condition()

    def are_done(self, actions):
        return self.done.issuperset(actions)

    def run(self, rank, action):
        self.perform(rank, action)
        with self.changed:
            self.done.add(action)
            self.changed.notify_all()

    def work(self, rank, actions):
        """What the thread of a rank does."""
        try:
            for action in actions:
                needs = self.needs(action)
                with self.changed:
                    self.changed.wait_for(lambda: self.stopped or self.are_done(needs))
                    if self.stopped:
                        return
                self.run(rank, action)
        except BaseException as error:
            self.stop(error)
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def wait(self):
        """Waits until no thread works any more; in pieces, as a wait without end sees no Ctrl-C."""
        with self.changed:
            while self.running:
                self.changed.wait(0.1)

    def stop(self, error):
        with self.changed:
            self.stopped = True
            self.error = self.error or error
            self.changed.notify_all()


def drive(tables, needs, perform, in_turn=False):
    """Performs every action of every rank, each as soon as its rank is free and its needs are met.

    Args:
      tables: for each rank its actions (hashable, each once), in the order in which it works them.
      needs: takes an action, returns the actions that must have been performed before.
      perform: takes rank and action; called in the thread of the rank.
      in_turn: whether to perform one action at a time, in this thread; for functions that are traced
        as they are first called.

    Raises:
      The first error of `perform`. No action begins after it, and when it is raised all threads have
      ended; so it is with an interrupt of the calling thread.
    """
    walk = _Walk(needs, perform)
    if in_turn:
        _take_turns(walk, tables)
        return
    threads = [
        threading.Thread(target=walk.work, args=(rank, actions), name=f"stage-{rank}", daemon=True)
        for rank, actions in enumerate(tables)
    ]
    try:
        for thread in threads:
            walk.running += 1
            thread.start()
        walk.wait()
    except BaseException as error:
        walk.stop(error)
        walk.wait()
        raise
    if walk.error is not None:
        raise walk.error


def _take_turns(walk, tables):
    left = [list(actions) for actions in tables]
    while any(left):
        waiting = []
        for rank, actions in enumerate(left):
            if actions and walk.are_done(walk.needs(actions[0])):
                walk.run(rank, actions.pop(0))
                break
            waiting += actions[:1]
        else:
            raise RuntimeError(f"the schedule is deadlocked: {waiting} wait for each other")

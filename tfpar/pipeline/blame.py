"""Whose error it is: the stage, micro-batch and layer that a failure comes from."""

import re

import tensorflow as tf

from tfpar.pipeline.schedule import FORWARD
from tfpar.strategy import rules


class StageError(RuntimeError):
    """A stage of a pipeline failed; the message names stage, micro-batch, layer and cause.

    Attributes:
      stage: the number of the virtual stage.
      micro_batch: the number of the micro-batch in its batch.
    """

    def __init__(self, message, stage=None, micro_batch=None):
        super().__init__(message)
        self.stage = stage
        self.micro_batch = micro_batch


class Blame:
    """A context in which errors are those of one stage at one micro-batch; the innermost one counts.

    Errors of TensorFlow's ops become a `StageError`; others keep their type and get a note.

    Args:
      stage: the `stage.Stage`.
      micro_batch: the number of the micro-batch.
      kind: of the action, `schedule.FORWARD` or another.
    """

    def __init__(self, stage, micro_batch, kind):
        self._stage, self._micro_batch = stage, micro_batch
        passing = "forward" if kind == FORWARD else "backward"
        self._where = f"stage {stage.index} (mesh {stage.rank}), micro-batch {micro_batch}, in its {passing} pass"

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if not isinstance(error, Exception) or getattr(error, "is_blamed", False):
            return
        names = self._stage.names
        if not isinstance(error, tf.errors.OpError):
            error.add_note(f"in {self._where}; its layers are {names}")
            error.is_blamed = True  # type: ignore[attr-defined]
            return
        known: Exception | None = rules.explain_failure(error)
        if known is None:
            layer = layer_in(str(error), names)
            layer = f"layer {layer!r}" if layer else f"one of its layers {names}"
            message = f"{self._where}: {layer} failed: {error.message[:2000]}"
            known = StageError(message, self._stage.index, self._micro_batch)
        else:
            known.add_note(f"in {self._where}")
        known.is_blamed = True  # type: ignore[attr-defined]
        raise known from error


def layer_in(text, names):
    """Which of the layers `names` the text of an error speaks of, by the name of an op; or None."""
    found = []
    for name in names:
        scope = re.escape(name.split("#")[0].rsplit("/", 1)[-1])
        places = [match.start() for match in re.finditer(rf"/{scope}(_\d+)?/", text)]
        found += [(place, len(name), name) for place in places]
    return max(found)[2] if found else None

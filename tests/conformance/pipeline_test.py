"""The reported faults in a pipeline: every case gives the numbers of one device."""

import cases
import fit_test
import pytest
import tensorflow as tf
from accumulation_test import DenseAdam
from mesh_test import compare

import tfpar

MESHES = {"pipe=2": (2, 1), "pipe=4": (4, 1), "pipe=2 data=2": (2, 2), "pipe=4 data=2": (4, 2)}
IDS = [id for id, make in cases.CASES.items() if "pp" in (make().kind, *make().also)]
CUT_IN_TWO = ("01", "17", "20", "21", "51")  # have fewer than four layers


def pipelined(case, pipe, data, micro_batches=None, **kwargs):
    """(strategy, builder) of a case; the builder makes a pipeline in the strategy's scope."""
    strategy = tfpar.MeshStrategy(fit_test.mesh(data=data, pipe=pipe))
    many = micro_batches or -(-case.batch // (case.micro or 3))

    def build():
        if tf.distribute.has_strategy():
            return tfpar.Pipeline(lambda: cases.build(case), micro_batches=many, **kwargs)
        return cases.build(case)

    return strategy, build


def check(case, mesh, optimizer=None, **kwargs):
    strategy, build = pipelined(case, *MESHES[mesh], **kwargs)
    through_outputs = case.through_outputs if optimizer else ()
    return compare(build, case, strategy, optimizer, through_outputs=through_outputs)


def adam():
    return DenseAdam(0.01, epsilon=1e-4)


def _runs():
    """Pipelines' own cases on all meshes; the others on one by default."""
    for case_id in IDS:
        own = cases.CASES[case_id]().kind == "pp"
        for mesh in MESHES:
            if "pipe=4" not in mesh or case_id not in CUT_IN_TWO:
                marks = [] if own or mesh == "pipe=2" else [pytest.mark.slow]
                yield pytest.param(case_id, mesh, marks=marks)


@pytest.mark.parametrize("case_id, mesh", _runs())
def test_with_adam(case_id, mesh):
    check(cases.CASES[case_id](), mesh, adam)


@pytest.mark.parametrize(
    "recompute", [pytest.param(True, marks=pytest.mark.slow), False], ids=["recompute", "residuals"]
)
@pytest.mark.parametrize("case_id", IDS)
def test_with_its_own_optimizer(case_id, recompute):
    check(cases.CASES[case_id](), "pipe=2", recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
@pytest.mark.parametrize("case_id", [id for id in IDS if id not in CUT_IN_TWO])
def test_other_schedules(case_id, schedule):
    check(cases.CASES[case_id](), "pipe=2 data=2", adam, schedule=schedule, recompute=False)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_50_fewer_micro_batches_than_stages(micro_batches):
    """Elsewhere: a hang."""
    check(cases.CASES["40"](), "pipe=4", adam, micro_batches=micro_batches)

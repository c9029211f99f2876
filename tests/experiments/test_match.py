"""Models matched by parameters or FLOPs really cost the same."""

import pytest

from rmt.config import preset, recipe
from rmt.errors import InputError
from rmt.experiments.match import TOLERANCE, match_models, solve
from rmt.streams import STREAMS
from rmt.theory.accounting import count


def test_matching_by_dimensions_changes_nothing_but_the_stream():
    base = preset("rmt-134m")
    for stream, model in match_models(base, list(STREAMS), "dims", recipe("rmt-134m")).items():
        assert model == base.replace(stream=stream)


@pytest.mark.parametrize("match", ["params", "flops"])
@pytest.mark.parametrize("name", ["rmt-tiny", "rmt-134m"])
def test_matched_models_cost_what_the_transformer_costs(match, name):
    models = match_models(preset(name), list(STREAMS), match, recipe(name))

    def cost(model):
        return count(model).non_embedding_params if match == "params" else count(model).flops.non_embedding_per_token

    target = cost(models["vector"])
    assert models["vector"] == preset(name).replace(stream="vector")
    for stream, model in models.items():
        near = TOLERANCE if model.layers == preset(name).layers else 0.3  # whole layers are coarse
        assert abs(cost(model) / target - 1) <= near, (stream, cost(model), target)


def test_the_matrix_stream_gets_the_neurons_that_its_keys_save():
    base = preset("rmt-134m")
    matched = match_models(base, ["matrix", "vector"], "params", recipe("rmt-134m"))["matrix"]
    assert matched.ff_dim > base.ff_dim
    assert matched.layers == base.layers


def test_time_is_matched_by_solving_the_measured_line():
    base = preset("rmt-tiny")
    seconds = {"calls": 0}

    def clock(model):
        seconds["calls"] += 1
        return 0.01 + 1e-5 * model.ff_dim

    matched = solve(base, clock, 0.02, "time", exact=False)
    assert matched.ff_dim == pytest.approx(1000, abs=16)
    assert seconds["calls"] <= 3


def test_an_unknown_way_to_match_is_refused():
    with pytest.raises(InputError, match="Did you mean 'params'"):
        match_models(preset("rmt-tiny"), ["matrix"], "parms", recipe("rmt-tiny"))

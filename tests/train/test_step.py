"""One optimizer step: accumulation, groups, schedule, clipping, and what happens to a batch that is not finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt.config import TrainConfig
from rmt.model import build
from rmt.theory.mup import roles_of
from rmt.train.optimizer import build_optimizer, clip_gradients, schedule
from rmt.train.step import Stepper
from strategies import configs, tokens


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulated_gradients_equal_those_of_the_whole_batch(model_config, micro_batch):
    ids = tokens(model_config, 8, 16)
    gradients = []
    for size in (8, micro_batch):
        stepper = Stepper(build(model_config), TrainConfig(batch_size=8, micro_batch=size, clip=1e9), steps=10)
        result = stepper.step(5, ids, ids.roll(-1, 1))
        gradients.append([parameter.grad for parameter in stepper.model.parameters()])
        assert math.isfinite(result.ce)
    for whole, parts in zip(*gradients, strict=True):
        assert (whole - parts).norm() <= 1e-6 * whole.norm()


@settings(max_examples=15, deadline=None)
@given(configs())
def test_every_parameter_is_in_exactly_one_group_and_only_linear_weights_decay(config):
    model = build(config)
    optimizer = build_optimizer(model, TrainConfig())
    roles = roles_of(model)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    decays = {id(p): group["weight_decay"] > 0 for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == roles[name].decays


def test_weight_decay_is_not_multiplied_by_the_learning_rate(model_config):
    """With no gradient at all a step shrinks a decaying weight by schedule * weight_decay, whatever lr is."""
    for lr in (1e-2, 1e-4):
        train = TrainConfig(lr=lr, weight_decay=1e-2)
        model = build(model_config)
        optimizer = build_optimizer(model, train)
        before = model.feed_forward[0].into_FD.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        torch.testing.assert_close(model.feed_forward[0].into_FD.detach(), before * (1 - 1e-2))


@given(st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1))
def test_the_schedule_rises_then_falls_between_zero_and_one(steps, warmup, final):
    values = [schedule(step, steps, warmup, final) for step in range(0, steps, max(1, steps // 50))]
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    peak = max(range(len(values)), key=values.__getitem__)
    assert values[: peak + 1] == sorted(values[: peak + 1])
    assert all(later <= earlier + 1e-12 for earlier, later in zip(values[peak:], values[peak + 1 :], strict=False))


def test_the_schedule_of_the_paper_warms_up_for_five_percent_and_ends_at_a_tenth():
    assert schedule(0, 1000) == 0
    assert schedule(25, 1000) == 0.5
    assert schedule(50, 1000) == 1
    assert schedule(1000, 1000) == pytest.approx(0.1)


def test_clipping_limits_the_joint_norm_and_leaves_small_gradients_alone():
    weights = [torch.zeros(3, requires_grad=True), torch.zeros(4, requires_grad=True)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    norm = clip_gradients(weights, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(7))
    assert math.sqrt(sum(w.grad.square().sum().item() for w in weights)) == pytest.approx(1.0)
    before = [w.grad.clone() for w in weights]
    clip_gradients(weights, 2.0)
    assert all(torch.equal(w.grad, b) for w, b in zip(weights, before, strict=True))


def test_a_batch_that_is_not_finite_changes_no_weight(model_config):
    model = build(model_config)
    with torch.no_grad():
        model.embedding.token_WD[3] = float("nan")
    stepper = Stepper(model, TrainConfig(), steps=10)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = stepper.step(5, torch.full((2, 4), 3), torch.full((2, 4), 1))
    assert not result.updated
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new) or old.isnan().any()


@pytest.mark.slow
def test_two_hundred_steps_overfit_sixty_four_windows(model_config):
    config = model_config.replace(layers=2, heads=4, head_dim=16, key_dim=16, ff_dim=256, vocab_size=64, context=32)
    torch.manual_seed(0)
    rows = torch.randint(0, 64, (64, 33))
    stepper = Stepper(build(config), TrainConfig(lr=2e-2, batch_size=64, weight_decay=0.0), steps=200)
    for step in range(200):
        result = stepper.step(step, rows[:, :-1], rows[:, 1:])
    assert result.ce < 0.1

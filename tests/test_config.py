"""Configurations check themselves, survive YAML, and misspelt names are met with the nearest known one."""

import pytest
from hypothesis import given, settings

import rmt
from rmt.config import PAPER_PRESETS, ModelConfig, MuP, TrainConfig
from rmt.errors import InputError
from strategies import configs

PARAMETERS = {
    "rmt-46m": 45_900_160,
    "rmt-134m": 134_291_072,
    "rmt-206m": 206_313_056,
    "rmt-305m": 305_128_448,
    "transformer-49m": 49_415_808,
    "transformer-160m": 162_541_824,
    "transformer-260m": 263_960_704,
    "transformer-405m": 405_490_688,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_papers_parameter_counts(name):
    model = rmt.build(rmt.preset(name), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_the_papers_presets_are_eight_and_every_preset_builds():
    assert set(PAPER_PRESETS) == set(PARAMETERS)
    for name in rmt.presets():
        rmt.build(rmt.preset(name), device="meta")
        assert rmt.recipe(name).total_steps(rmt.preset(name).context) > 0


def test_a_mirrored_pair_is_one_configuration_with_another_stream():
    for mine, theirs in (("rmt-134m", "transformer-160m"), ("rmt-tiny", "transformer-tiny")):
        assert rmt.preset(mine).replace(stream="vector") == rmt.preset(theirs)


@settings(max_examples=30, deadline=None)
@given(configs())
def test_yaml_round_trip_gives_the_same_configuration(config):
    assert ModelConfig.from_yaml(config.to_yaml()) == config


def test_yaml_files_are_read_and_written(tmp_path):
    config = ModelConfig(init="mup", mup=MuP(base_heads=4, sigma=0.15))
    config.to_yaml(tmp_path / "model.yaml")
    assert ModelConfig.from_yaml(tmp_path / "model.yaml") == config
    with pytest.raises(InputError, match="cannot read"):
        ModelConfig.from_yaml(tmp_path / "missing.yaml")
    (tmp_path / "broken.yaml").write_text("layers: [")
    with pytest.raises(InputError, match="not valid YAML"):
        ModelConfig.from_yaml(tmp_path / "broken.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers = 0: must be greater than zero"),
        ({"heads": -2}, "heads = -2"),
        ({"key_dim": 1.5}, "key_dim = 1.5: must be a whole number"),
        ({"ff_dim": "many"}, "ff_dim = 'many'"),
        ({"kv_heads": 5}, "kv_heads = 5: must divide heads = 12"),
        ({"width": 512}, "width = 512: a matrix stream has no width"),
        ({"stream": "matrx"}, "Did you mean 'matrix'"),
        ({"norm": "layer"}, "Did you mean 'layernorm'"),
        ({"position": "sinusoidal"}, "Choose one of: alibi, learned, rope"),
        ({"position": "rope", "head_dim": 63}, "even head_dim"),
        ({"norm_eps": float("nan")}, "norm_eps = nan"),
        ({"layer": 3}, "no field 'layer'. Did you mean 'layers'"),
    ],
)
def test_a_wrong_field_is_named_with_its_fix(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        ModelConfig().replace(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps = 0: must be greater than zero"),
        ({"lr": -1e-3}, "lr = -0.001: must be greater than zero"),
        ({"warmup": 1.5}, "warmup = 1.5: is a share"),
        ({"batch_size": 10, "micro_batch": 4}, "micro_batch = 4: must divide batch_size = 10"),
        ({"steps": 10, "tokens": 100}, "give one of them"),
        ({"on_nan": "ignore"}, "on_nan"),
    ],
)
def test_a_wrong_training_setting_is_named_with_its_fix(changes, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(**changes)


def test_tokens_become_whole_steps_and_a_run_needs_a_length():
    assert TrainConfig(tokens=1000, batch_size=2).total_steps(context=100) == 5
    assert TrainConfig(tokens=1001, batch_size=2).total_steps(context=100) == 6
    with pytest.raises(InputError, match=r"train\.steps or train\.tokens"):
        TrainConfig().total_steps(context=100)


def test_unknown_presets_are_met_with_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'rmt-134m'"):
        rmt.preset("rmt-143m")

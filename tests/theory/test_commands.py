"""`rmt count` and `rmt moments` as a user calls them, and the layers of settings that commands share."""

import json

import pytest
import yaml

import rmt
from rmt.cli import main
from rmt.commands.base import ArgumentParser, add_settings, resolve_settings
from rmt.config import PRESETS


@pytest.fixture
def call(capsys):
    def run(*arguments):
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def resolve(*flags, preset=None):
    parser = ArgumentParser(prog="rmt test")
    add_settings(parser, "model", "train")
    return resolve_settings(parser.parse_args(list(flags)), preset)


@pytest.mark.parametrize(("name", "params"), [("rmt-134m", 134291072), ("transformer-160m", 162541824)])
def test_count_json_has_the_number_of_parameters(call, name, params):
    status, out, _ = call("count", name, "--json")
    answer = json.loads(out)
    assert status == 0
    assert answer["params"] == params == sum(answer["params_by_part"].values())
    assert answer["flops"]["training"]["tokens"] == rmt.recipe(name).tokens


def test_count_puts_models_side_by_side(call):
    status, out, _ = call("count", "rmt-134m", "transformer-160m")
    assert status == 0
    for number in ("134,291,072", "162,541,824", "136,028,160", "188,964,864", "docs/errata.md"):
        assert number in out


@pytest.mark.parametrize("name", PRESETS)
def test_count_prints_every_preset(call, name):
    status, out, _ = call("count", name)
    assert status == 0
    assert "total" in out


def test_count_takes_overrides_and_several_models_as_json(call):
    _, out, _ = call("count", "rmt-134m", "rmt-305m", "--model.key_dim", "48", "--batch", "2", "--json")
    answers = json.loads(out)
    assert [answer["config"]["key_dim"] for answer in answers] == [48, 48]
    assert [answer["name"] for answer in answers] == ["rmt-134m", "rmt-305m"]


def test_count_reads_a_file_of_sections_or_of_model_keys(call, tmp_path):
    config = rmt.preset("rmt-tiny").replace(key_dim=24)
    flat, sections = tmp_path / "flat.yaml", tmp_path / "sections.yaml"
    config.to_yaml(flat)
    sections.write_text("preset: rmt-tiny\nmodel:\n  key_dim: 24\ntrain:\n  lr: 1e-2\n")
    answers = [call("count", *arguments, "--json") for arguments in (("--config", str(flat)), (str(sections),))]
    assert [json.loads(out)["params"] for _, out, _ in answers] == [rmt.count(config).params] * 2


def test_count_draws_the_figure(call, tmp_path):
    status, out, _ = call("count", "--figure", str(tmp_path / "new" / "resources.png"))
    assert status == 0
    assert (tmp_path / "new" / "resources.png").stat().st_size > 10_000
    assert "resources.svg" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rmt-134"], "Did you mean 'rmt-134m'?"),
        ([], "rmt count rmt-134m"),
        (["rmt-134m", "--model.key_dm", "3"], "Did you mean '--model.key_dim'?"),
        (["rmt-134m", "--model.key_dim", "wide"], "model.key_dim must be a whole number, got 'wide'."),
        (["rmt-134m", "--model.key_dim", "0"], "key_dim = 0"),
        (["rmt-134m", "--model.stream", "matrx"], "Did you mean 'matrix'?"),
        (["rmt-134m", "--model.qk_norm", "maybe"], "true or false"),
        (["rmt-134m", "--batch", "0"], "batch = 0"),
        (["rmt-134m", "--tokens", "-1"], "greater than zero"),
        (["rmt-134m", "--recompute", "ful"], "Did you mean 'full'?"),
        (["missing.yaml"], "cannot read missing.yaml"),
        (["--figure", "figure.pdf"], ".png and .svg"),
    ],
)
def test_count_explains_bad_input_in_one_line(call, arguments, message):
    status, out, err = call("count", *arguments)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle:\n  key_dim: 3\n", "Did you mean 'model'?"),
        ("model:\n  key_dmi: 3\n", "Did you mean 'key_dim'?"),
        ("model: 3\n", "section 'model'"),
        ("- 1\n", "holds no settings"),
        ("model:\n  mup:\n    sigm: 3\n", "unknown key model.mup.sigm. Did you mean 'sigma'?"),
        ("model: [\n", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_explained_in_one_line(call, tmp_path, text, message):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    status, _, err = call("count", "--config", str(file))
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_flags_win_over_file_over_preset_over_defaults(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("model:\n  layers: 3\n  key_dim: 5\n  mup:\n    sigma: 1e-1\ntrain:\n  lr: 3e-3\n  batch_size: 8\n")
    settings = resolve("--config", str(file), "--model.key_dim", "7", "--train.lr", "1e-3", preset="rmt-tiny")
    assert (settings.model.heads, settings.model.layers, settings.model.key_dim) == (4, 3, 7)
    assert settings.model.mup.sigma == 0.1
    assert settings.model.mup.zero_unembedding is True
    assert (settings.train.steps, settings.train.batch_size, settings.train.lr) == (800, 8, 1e-3)


def test_a_new_length_of_the_run_replaces_that_of_the_preset():
    settings = resolve("--train.tokens", "1e6", preset="rmt-tiny")
    assert (settings.train.steps, settings.train.tokens) == (None, 1_000_000)


def test_values_can_be_unset():
    assert resolve("--model.kv_heads", "null", preset="rmt-modern-134m").model.kv_heads is None


def test_print_config_prints_what_would_hold(capsys):
    with pytest.raises(SystemExit) as stop:
        resolve("--model.key_dim", "9", "--print-config", preset="rmt-tiny")
    assert stop.value.code == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["model"]["key_dim"] == 9
    assert values["train"]["steps"] == 800


def test_moments_prints_the_table_and_marks_what_is_wrong(call):
    status, out, _ = call("moments", "--samples", "1000")
    assert status == 0
    assert out.count("wrong") == 3  # two rows and the pointer to the errata
    assert "1.14/0.86" in out


def test_moments_json_has_every_row(call):
    _, out, _ = call("moments", "--samples", "0", "--key-dim", "8", "--json")
    answer = json.loads(out)
    assert answer["dims"]["key_dim"] == 8
    assert len(answer["rows"]) == 8

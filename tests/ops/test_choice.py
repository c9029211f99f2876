"""Choosing the operations: what is refused, what falls back, and that every choice computes the authors' numbers."""

import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rmt.config import ModelConfig, TrainConfig
from rmt.errors import InputError
from rmt.hub.reference import from_reference, reference_state
from rmt.model import build as build_model
from rmt.ops import choice
from rmt.ops.native import build
from rmt.train.optimizer import build_optimizer, clip_gradients

TINY = ModelConfig(layers=2, heads=4, head_dim=16, key_dim=16, ff_dim=64, vocab_size=64, context=32)
IDS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))


def test_unknown_ops_are_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="Did you mean 'native'"):
        build_model(TINY).set_ops("nativ")


def test_triton_without_a_gpu_is_refused_in_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError) as problem:
        build_model(TINY).set_ops("triton")
    assert "\n" not in str(problem.value)


def test_a_new_model_uses_the_best_ops_and_set_ops_reaches_every_module(native):
    model = build_model(TINY)
    assert model.ops == "auto"
    assert choice.choose("auto", model.unembedding.weight_WD) == "native"
    model.set_ops("portable")
    assert {module.ops for module in model.modules() if hasattr(module, "ops")} == {"portable"}


def test_float64_goes_the_portable_way_whatever_is_chosen():
    x = torch.zeros(1, dtype=torch.float64)
    assert [choice.choose(name, x) for name in choice.OPS] == ["portable", "plain", "portable", "portable", "portable"]


def test_a_flop_counter_sees_every_product():
    """Native products would be invisible to it, so the plain ones run while somebody counts."""
    model = build_model(TINY)
    counts = []
    for ops in ("plain", "auto"):
        model.set_ops(ops)
        with FlopCounterMode(display=False) as counter:
            assert model(IDS).logits.isfinite().all()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_without_a_compiler_the_portable_ops_run_and_one_line_says_so(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = build_model(TINY)
    model.set_ops("plain")
    exact = model(IDS, targets=IDS).loss
    with caplog.at_level(logging.WARNING, "rmt.ops"):
        model.set_ops("auto")
        loss = model(IDS, targets=IDS).loss
        model(IDS)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.text
    with pytest.raises(InputError, match=r"cannot run here.*no-such-compiler"):
        model.set_ops("native")


def test_a_cpu_that_the_compiler_does_not_know_is_reported_in_one_line_and_the_portable_ops_run(
    fresh, monkeypatch, caplog
):
    monkeypatch.setattr(build, "FLAGS", ("-march=no-such-cpu",))
    model = build_model(TINY)
    with caplog.at_level(logging.WARNING, "rmt.ops"):
        assert "failed" in build.problem()
        loss = model(IDS, targets=IDS).loss
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert not list(fresh.iterdir())
    model.set_ops("plain")
    assert loss.item() == pytest.approx(model(IDS, targets=IDS).loss.item(), rel=1e-6)


@pytest.mark.slow
def test_without_write_access_the_library_is_compiled_for_this_run(fresh, monkeypatch, caplog, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("RMT_CACHE", str(in_the_way / "cache"))
    with caplog.at_level(logging.WARNING, "rmt.ops"):
        assert not build.problem()
    assert len(caplog.records) == 1
    assert "for this run only" in caplog.text
    model = build_model(TINY)
    model.set_ops("native")
    assert model(IDS, targets=IDS).loss.isfinite()


@pytest.mark.slow
def test_two_processes_that_compile_at_once_both_get_a_whole_library(tmp_path, native):
    code = "from rmt.ops.native import build; assert not build.problem(); build.library().rmt_loss_rows"
    environment = os.environ | {"RMT_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(300) for process in both] == [0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("RMT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "rmt"
    monkeypatch.setenv("RMT_CACHE", str(tmp_path / "mine"))
    assert build.cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("ops", ["plain", "portable", "native"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("file", ["rmt_a", "rmt_mup", "transformer_a"])
def test_every_choice_computes_the_authors_numbers(native, shared, file, ops, recompute):
    assert_equal_to_the_authors(shared / "golden" / f"{file}.npz", ops, recompute)


def assert_equal_to_the_authors(path, ops, recompute):
    arrays = dict(np.load(path))
    meta = json.loads(str(arrays.pop("meta")))

    def tree(prefix):
        return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}

    model = from_reference(tree("param/"), meta)
    model.set_ops(ops)
    model.recompute = recompute
    documents = torch.from_numpy(arrays["mask_2docs"]).int().argmax(-1)
    ids, targets = (torch.from_numpy(arrays[name]).long() for name in ("input_ids", "target_ids"))
    output = model(ids, targets=targets, document_ids=documents)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(float(arrays["2docs/zloss"]), rel=2e-6)
    assert (
        np.abs(output.logits.detach().numpy() - arrays["2docs/logits"]).max()
        <= 5e-6 * np.abs(arrays["2docs/logits"]).max()
    )
    for name, gradient in reference_state(tree("2docs/grad/"), model.config).items():
        error = np.abs(model.get_parameter(name).grad.numpy() - gradient).max()
        assert error <= 1e-5 * np.abs(gradient).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["portable", "native"])
def test_training_200_steps_gives_the_same_losses_as_plain(native, ops):
    def losses(ops):
        model = build_model(TINY)
        model.set_ops(ops)
        optimizer = build_optimizer(model, TrainConfig(lr=3e-3, steps=200))
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(200):
            start = torch.randint(0, 64, (8, 1), generator=generator)
            ids = (start + torch.arange(33) * (1 + start % 5)) % 64
            loss = model(ids[:, :-1], targets=ids[:, 1:]).loss
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    plain, fast = losses("plain"), losses(ops)
    assert plain[-1] < 0.7 * plain[0]
    assert (plain - fast).abs().max() < 1e-4

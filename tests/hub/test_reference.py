"""Our model, losses, gradients and optimizer against the numbers that the authors' own code computes."""

import json

import numpy as np
import pytest
import torch

from rmt.config import TrainConfig
from rmt.errors import InputError
from rmt.hub.reference import from_reference, reference_config, reference_state
from rmt.train.step import Stepper

FILES = ["rmt_a", "rmt_mup", "transformer_a"]


class Golden:
    def __init__(self, path):
        self.arrays = dict(np.load(path))
        self.meta = json.loads(str(self.arrays.pop("meta")))

    def __getitem__(self, key):
        return self.arrays[key]

    def tensor(self, key):
        return torch.from_numpy(self.arrays[key]).long()

    def tree(self, prefix):
        found = {key.removeprefix(prefix): array for key, array in self.arrays.items() if key.startswith(prefix)}
        assert found, prefix
        return found

    def model(self):
        return from_reference(self.tree("param/"), self.meta)


@pytest.fixture(params=FILES)
def golden(request, shared):
    return Golden(shared / "golden" / f"{request.param}.npz")


def documents(mask):
    """The first token that each token may attend to names its document."""
    return torch.from_numpy(mask).int().argmax(-1)


def assert_close(ours, theirs, tolerance, what=""):
    ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else np.asarray(ours)
    error = np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30)
    assert ours.shape == theirs.shape, what
    assert error <= tolerance, f"{what}: {error:.2e} > {tolerance:.0e}"


@pytest.mark.parametrize("mask", ["causal", "2docs"])
def test_logits_losses_and_gradients_equal_the_authors(golden, mask):
    model = golden.model()
    document_ids = None if mask == "causal" else documents(golden["mask_2docs"])
    output = model(golden.tensor("input_ids"), targets=golden.tensor("target_ids"), document_ids=document_ids)
    assert_close(output.logits, golden[f"{mask}/logits"], 5e-6, "logits")
    assert_close(output.loss, golden[f"{mask}/zloss"], 2e-6, "z-loss")
    assert_close(output.ce, golden[f"{mask}/ce"], 2e-6, "cross-entropy")
    output.loss.backward()
    theirs = reference_state(golden.tree(f"{mask}/grad/"), model.config)
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(ours[name].grad, gradient, 1e-5, name)


def test_twenty_optimizer_steps_equal_the_authors(golden):
    settings = golden.meta["optimizer"]
    steps = settings["steps"]
    train = TrainConfig(
        lr=settings["lr"],
        steps=steps,
        warmup=settings["warmup_steps"] / steps,
        final_lr=settings["end_value"],
        weight_decay=settings["weight_decay"],
        beta1=settings["b1"],
        beta2=settings["b2"],
        eps=settings["eps"],
        clip=settings["grad_clip"],
    )
    model = golden.model()
    stepper = Stepper(model, train, steps)
    results = []
    for step in range(steps):
        ids, targets = golden.tensor("train_input_ids")[step], golden.tensor("train_target_ids")[step]
        results.append(stepper.step(step, ids, targets, documents(golden["train_mask"][step])))
        if f"train/params_after_{step + 1}/embedding" in golden.arrays:
            assert_parameters(model, golden, f"train/params_after_{step + 1}/")
    assert_close([result.lr / train.lr for result in results], golden["train/schedule"], 1e-6, "schedule")
    assert_close([result.loss for result in results], golden["train/zloss"], 5e-6, "train z-loss")
    assert_close([result.ce for result in results], golden["train/ce"], 5e-6, "train cross-entropy")
    assert_close([result.grad_norm for result in results], golden["train/grad_norm_preclip"], 1e-5, "gradient norm")
    assert_parameters(model, golden, "train/final/")


def assert_parameters(model, golden, prefix):
    theirs = reference_state(golden.tree(prefix), model.config)
    for name, parameter in model.named_parameters():
        assert_close(parameter, theirs[name], 2e-4, f"{prefix}{name}")


def test_learning_rates_multipliers_and_decay_equal_the_authors_table(golden):
    from rmt.theory import mup

    model = golden.model()
    roles = mup.roles_of(model)
    theirs = golden.meta
    assert mup.attention_scale(model.config, 0) == pytest.approx(theirs["attn_logit_scale"])
    assert model.embedding.scale == pytest.approx(theirs["multiplier"]["embedding"])
    assert model.unembedding.scale == pytest.approx(theirs["multiplier"]["unembedding"])
    tags = {
        name: np.full(array.shape, index, float) for index, (name, array) in enumerate(golden.tree("param/").items())
    }
    for name, tag in reference_state(tags, model.config).items():
        their_name = list(tags)[int(tag.flat[0])]
        assert mup.lr_scale(model.config, roles[name]) == pytest.approx(theirs["lr_mult"][their_name]), name
        assert roles[name].decays == theirs["apply_wd"][their_name], name


def test_a_round_trip_through_the_mapping_keeps_every_number():
    """Without the golden files: tagged arrays land where the axes of the authors' layout say."""
    meta = {
        "kind": "rmt",
        "config": dict(vocab_size=5, reskey_dim=3, resval_dim=4, rank=2, n_layers=1, n_neurons=6),
    }
    rng = np.random.default_rng(0)
    W1 = rng.normal(size=(1, 4, 2, 6)).astype("float32")
    qkv = rng.normal(size=(1, 3, 3, 2)).astype("float32")
    state = reference_state({"rmt_stack.mlp.W1": W1, "rmt_stack.attention.qkv_linear": qkv}, reference_config(meta))
    assert state["feed_forward.0.into_FD"][5, 1 * 4 + 3] == W1[0, 3, 1, 5]
    assert state["stream.0.retrieve.keys_RK"][2 * 2 + 1, 2] == qkv[0, 2, 2, 1]


def test_unknown_reference_names_are_refused_with_the_nearest():
    meta = {
        "kind": "transformer",
        "config": dict(vocab_size=5, embed_dim=4, n_heads=2, head_dim=2, n_layers=1, n_neurons=6),
    }
    with pytest.raises(InputError, match="Did you mean 'embedding'"):
        reference_state({"embeding": np.zeros((5, 4))}, reference_config(meta))

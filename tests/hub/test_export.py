"""Export and import: exact round trips, a folder that stands alone, and one clear line for every damaged one."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rmt.cli import main
from rmt.errors import InputError
from rmt.hub.export import export
from rmt.hub.folder import load_model
from rmt.hub.importing import import_authors, import_folder


@pytest.fixture
def damaged(exported, tmp_path):
    """A copy to damage."""
    return shutil.copytree(exported, tmp_path / "damaged")


def one_line(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rmt: ")
    assert error.count("\n") == 1
    return error


def test_run_to_folder_to_run_to_folder_keeps_every_bit(tiny_run, exported, tmp_path):
    run = import_folder(exported, tmp_path / "run")
    again = export(load_model(run), tmp_path / "exported")
    for path in sorted(exported.iterdir()):
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    weights = [load_file(load_checkpoint(place) / "model.safetensors") for place in (tiny_run, run)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def load_checkpoint(run):
    return run / "checkpoints" / (run / "checkpoints" / "best").read_text().strip()


def test_the_folder_loads_with_plain_transformers_and_its_tokenizer_reads_as_ours(tiny_run, exported):
    from transformers import AutoTokenizer

    ours, theirs = load_model(tiny_run), AutoTokenizer.from_pretrained(exported)
    text = "every layer is read,  and\nwritten é"
    assert theirs(text)["input_ids"] == ours.tokenizer.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eot
    assert theirs.padding_side == "left"


def test_the_card_says_what_was_trained_on_what_and_with_what_result(tiny_run, exported):
    card, record = (exported / "README.md").read_text(), json.loads((exported / "rmt.json").read_text())
    assert record["data"]["fingerprint"] in card
    assert f"{record['dev_ce']:.4f}" in card
    for part in ("parameters", "training FLOPs", "## Limits", "The command:", "key_dim", 'from_pretrained("exported")'):
        assert part in card


def test_an_imported_run_can_be_trained_on(tiny_run, exported, tmp_path):
    from rmt.train.loop import train
    from rmt.train.run import RunConfig

    run = import_folder(exported, tmp_path / "run")
    config = RunConfig.load(run / "config.yaml")
    assert main(["export", str(run), str(tmp_path / "out"), "--json"]) == 0
    result = train(config.model, config.train, tiny_run.parent / "tokens", run, resume=True)
    assert result.step == 30


def test_dtype_and_checkpoint_can_be_chosen(tiny_run, tmp_path):
    assert main(["export", str(tiny_run), str(tmp_path / "a"), "--dtype", "bfloat16", "--checkpoint", "10"]) == 0
    assert json.loads((tmp_path / "a" / "rmt.json").read_text())["step"] == 10
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_model(tmp_path / "a").model.unembedding.weight_WD.dtype == torch.bfloat16
    assert load_model(tiny_run, checkpoint=10).record["step"] == 10


@pytest.mark.slow
def test_the_folder_with_code_runs_where_the_package_is_not_installed(tiny_run, tmp_path):
    loaded = load_model(tiny_run)
    folder = export(loaded, tmp_path / "standalone", with_code=True)
    prompt = loaded.tokenizer.encode("the stream of").ids
    code = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'rmt': raise ImportError('hidden')\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        f"torch.save(model(torch.tensor([{prompt}])).logits.detach(), {str(tmp_path / 'logits.pt')!r})\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    theirs = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(theirs, loaded.model(torch.tensor([prompt])).logits, rtol=1e-4, atol=1e-5)


def test_the_authors_tree_becomes_a_run_with_the_same_logits(shared, tmp_path, capsys):
    from rmt.hub.reference import from_reference

    file = shared / "golden" / "rmt_a.npz"
    assert main(["import", "--from-authors", str(file), "--out", str(tmp_path / "run")]) == 0
    arrays = dict(np.load(file))
    meta = json.loads(str(arrays.pop("meta")))
    theirs = from_reference({key: value for key, value in arrays.items() if key.startswith("param/")}, meta)
    ids = torch.from_numpy(arrays["input_ids"]).long()
    assert torch.equal(load_model(tmp_path / "run").model(ids).logits, theirs(ids).logits)
    assert "has no tokenizer" in one_line(capsys, "export", tmp_path / "run", tmp_path / "out")


def test_a_small_tree_of_the_authors_needs_no_files_at_hand(tmp_path):
    config = dict(vocab_size=5, embed_dim=4, n_heads=2, head_dim=2, n_layers=1, n_neurons=6, max_seq_len=8)
    shapes = {
        "embedding": (5, 4),
        "transformer_stack.attention.norm": (1, 4),
        "transformer_stack.attention.qkv_linear": (1, 4, 3, 2, 2),
        "transformer_stack.attention.out_linear": (1, 2, 2, 4),
        "transformer_stack.mlp.norm": (1, 4),
        "transformer_stack.mlp.W1": (1, 4, 6),
        "transformer_stack.mlp.W2": (1, 6, 4),
        "norm": (4,),
        "unembedding": (4, 5),
    }
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    meta = json.dumps({"kind": "transformer", "config": config})
    np.savez(tmp_path / "tree.npz", meta=meta, **arrays)
    run = import_authors(tmp_path / "tree.npz", tmp_path / "run")
    np.testing.assert_array_equal(load_model(run).model.embedding.token_WD.detach().numpy(), arrays["embedding"])
    np.savez(tmp_path / "odd.npz", meta=meta, **{**arrays, "norm": np.ones(3, "float32")})
    with pytest.raises(InputError, match="do not fit its configuration"):
        import_authors(tmp_path / "odd.npz", tmp_path / "odd")
    np.savez(tmp_path / "bare.npz", **arrays)
    with pytest.raises(InputError, match="has no `meta`"):
        import_authors(tmp_path / "bare.npz", tmp_path / "bare")
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(InputError, match="is not an npz"):
        import_authors(tmp_path / "text.npz", tmp_path / "text")


def test_a_pickle_instead_of_safetensors_is_refused_unread(damaged, capsys):
    (damaged / "model.safetensors").unlink()
    (damaged / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert "pytorch_model.bin, a pickle, which could run code" in one_line(capsys, "generate", damaged, "--prompt", "a")


def test_a_config_of_another_model_is_refused(damaged, tmp_path, capsys):
    (damaged / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "a model of type 'gpt2', not 'rmt'" in one_line(capsys, "import", damaged, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("left", [0, 4, 100, 5000])
def test_a_truncated_weight_file_is_named(damaged, left, capsys):
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    assert "model.safetensors is damaged or incomplete" in one_line(capsys, "generate", damaged, "--prompt", "a")


def test_weights_that_do_not_fit_the_configuration_are_named(damaged, capsys):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"ff_dim": 64}))
    assert "feed_forward.0.into_FD have shape [32, 16]" in one_line(capsys, "generate", damaged, "--prompt", "a")
    (damaged / "config.json").write_text(json.dumps(config | {"layers": 3}))
    assert "its weights lack 'feed_forward.2.into_FD'" in one_line(capsys, "generate", damaged, "--prompt", "a")


def test_a_tokenizer_that_does_not_fit_the_vocabulary_is_refused(damaged, capsys):
    tokenizer = json.loads((damaged / "tokenizer.json").read_text())
    place = max(tokenizer["model"]["vocab"].values())
    tokenizer["model"]["vocab"] |= {f"extra{number}": place + number for number in range(1, 60)}
    (damaged / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "tokens, the model's vocabulary 320: they do not belong" in one_line(
        capsys, "generate", damaged, "--prompt", "a"
    )


def test_other_wrong_input_is_one_line_too(tiny_run, exported, tmp_path, capsys):
    assert "there is no folder" in one_line(capsys, "export", tmp_path / "none", tmp_path / "out")
    assert "neither a run" in one_line(capsys, "export", tmp_path, tmp_path / "out")
    assert "exists already" in one_line(capsys, "export", tiny_run, exported)
    assert "no checkpoint '7'" in one_line(capsys, "export", tiny_run, tmp_path / "out", "--checkpoint", 7)
    assert "Did you mean 'bfloat16'" in one_line(capsys, "export", tiny_run, tmp_path / "out", "--dtype", "bfloat")
    assert "is a run already" in one_line(capsys, "import", tiny_run, "--out", tmp_path / "out")
    assert "give one of them" in one_line(capsys, "import", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_named_and_not_exported(tiny_run, tmp_path, capsys):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    path = load_checkpoint(run) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "model.safetensors" in one_line(capsys, "export", run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_has_changed_does_not_lend_its_tokenizer(tiny_run, tmp_path, capsys):
    import yaml

    run = shutil.copytree(tiny_run, tmp_path / "run")
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["data"]["fingerprint"] = "0" * 64
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert "not the dataset that" in one_line(capsys, "generate", run, "--prompt", "a")

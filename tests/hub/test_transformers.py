"""The adapter: transformers' own ways of loading, generating, training and saving give our model's numbers."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import rmt
from hub.conftest import small
from rmt.errors import InputError
from rmt.hub.configuration import RMTConfig
from rmt.hub.folder import load_model
from rmt.hub.modeling import RMTForCausalLM
from rmt.sampling import left_pad, sample
from rmt.streams import STREAMS


@pytest.fixture
def model(exported):
    return AutoModelForCausalLM.from_pretrained(exported)


@pytest.fixture
def ids():
    return torch.randint(1, 300, (2, 9))


def greedy(model, ids, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **options)


@pytest.mark.parametrize(
    "order",
    [
        "import rmt, sys; assert not {'torch', 'transformers'} & sys.modules.keys(); import transformers",
        pytest.param("import transformers, rmt", marks=pytest.mark.slow),
        pytest.param("from transformers import AutoModelForCausalLM; import rmt, transformers", marks=pytest.mark.slow),
        pytest.param("from transformers import AutoConfig; import rmt, transformers", marks=pytest.mark.slow),
    ],
)
def test_the_auto_classes_know_our_models_whichever_package_is_imported_first(order):
    code = (
        f"{order}\n"
        "config = transformers.AutoConfig.for_model('rmt', layers=1, heads=1, head_dim=4, key_dim=2, ff_dim=4, "
        "vocab_size=8, context=4)\n"
        "model = transformers.AutoModelForCausalLM.from_config(config)\n"
        "assert type(model).__name__ == 'RMTForCausalLM'\n"
        "assert type(transformers.AutoModel.from_config(config)).__name__ == 'RMTModel'\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_logits_equal_the_runs_model_bit_for_bit(tiny_run, exported, model, ids):
    ours = load_model(tiny_run).model
    assert torch.equal(model(ids).logits, ours(ids).logits)
    assert torch.equal(AutoModel.from_pretrained(exported)(ids).last_hidden_state, ours(ids).hidden_BTD)
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits[:, 0], ours(ids).logits[:, -1])


@pytest.mark.parametrize("stream", STREAMS)
def test_every_stream_survives_save_and_load(stream, tmp_path):
    network = rmt.build(small(stream=stream, position="rope", value_residual=True), seed=5).eval()
    RMTForCausalLM.from_language_model(network).save_pretrained(tmp_path)
    ids = torch.randint(0, 300, (2, 7))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, network(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).model_config() == network.config


def test_greedy_with_cache_without_cache_static_cache_and_native_are_the_same(tiny_run, model, ids):
    expected = sample(load_model(tiny_run).model, ids, 12, temperature=0)
    assert torch.equal(greedy(model, ids), expected)
    assert torch.equal(greedy(model, ids, use_cache=False), expected)
    assert torch.equal(greedy(model, ids, cache_implementation="static"), expected)


@pytest.mark.parametrize("position", ["learned", "alibi", "rope"])
@pytest.mark.parametrize("stream", ["matrix", "vector"])
def test_a_left_padded_batch_gives_what_each_prompt_gives_alone(stream, position):
    network = rmt.build(small(stream=stream, position=position), seed=1).eval()
    model = RMTForCausalLM.from_language_model(network, pad_token_id=0)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]
    ids, mask = left_pad(prompts, pad=0)
    together = greedy(model, ids, attention_mask=mask)
    native = sample(network, ids, 12, mask_BT=mask, temperature=0)
    for row, prompt in enumerate(prompts):
        alone = greedy(model, torch.tensor([prompt]))[0]
        assert torch.equal(together[row, -len(alone) :], alone)
        assert torch.equal(native[row, -len(alone) :], alone)


def test_padding_on_the_right_changes_no_logit_of_the_text(model, ids):
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[0, :5], model(ids[:1, :5]).logits[0])


def test_beam_search_and_sampling_run_and_end_with_the_context(model, ids):
    mask = torch.ones_like(ids)
    beams = model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=3, do_sample=False)
    assert beams.shape[0] == 2
    assert beams.shape[1] <= 15
    drawn = model.generate(ids, attention_mask=mask, max_new_tokens=1000, do_sample=True, eos_token_id=-1)
    assert drawn.shape == (2, model.config.context)


def test_beam_search_finds_no_worse_a_text_than_greedy(model, ids):
    def log_likelihood(row):
        logits = model(row[None]).logits[0, 8:-1].log_softmax(-1)
        return logits.gather(-1, row[9:, None]).sum()

    options = dict(attention_mask=torch.ones(1, 9), max_new_tokens=6, do_sample=False, eos_token_id=-1)
    beam = model.generate(ids[:1], num_beams=8, length_penalty=0.0, **options)[0]
    assert log_likelihood(beam) >= log_likelihood(model.generate(ids[:1], **options)[0]) - 1e-5


def test_labels_are_shifted_and_the_loss_in_evaluation_is_the_cross_entropy(model, ids):
    labels = ids.clone()
    labels[:, :3] = -100
    logits = model(ids).logits[:, 2:-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 3:].flatten())
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)
    part = model(ids, labels=labels, num_items_in_batch=48).loss
    torch.testing.assert_close(part, expected * 12 / 48)


def test_gradient_checkpointing_changes_memory_and_not_gradients(model, ids):
    model.train()
    model(ids, labels=ids).loss.backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    model(ids, labels=ids).loss.backward()
    for parameter, before in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, before, rtol=1e-5, atol=1e-7)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_save_load_save_gives_identical_files(exported, model, tmp_path):
    model.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes(), name


def test_sharded_weights_load_here_and_in_transformers(exported, model, ids, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    assert torch.equal(load_model(tmp_path).model(ids).logits, model(ids).logits)


def test_a_new_model_and_parameters_that_a_file_lacks_start_as_rmt_build_starts_them(exported, tmp_path):
    fresh = rmt.build(small())
    made = RMTForCausalLM(RMTConfig.from_model_config(small()))
    assert all(torch.equal(value, fresh.get_parameter(name)) for name, value in made.model.network.named_parameters())
    state = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    dropped = state.pop("model.network.unembedding.weight_WD")
    partly = RMTForCausalLM.from_pretrained(None, config=AutoConfig.from_pretrained(exported), state_dict=state)
    network = partly.model.network
    assert torch.equal(network.unembedding.weight_WD, rmt.build(network.config).unembedding.weight_WD)
    assert not torch.equal(network.unembedding.weight_WD, dropped)
    assert torch.equal(network.embedding.token_WD, state["model.network.embedding.token_WD"])


def test_half_precision_loads_and_generates(exported, ids):
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert greedy(model, ids).shape[1] > 9


def test_what_is_not_supported_says_so_in_one_line(model, ids):
    with pytest.raises(InputError, match="input_ids are needed"):
        model(inputs_embeds=torch.zeros(1, 2, 16))
    with pytest.raises(InputError, match="attention_mask has shape"):
        model(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(InputError, match="vocabulary of 320 tokens is fixed"):
        model.resize_token_embeddings(400)
    with pytest.raises(InputError, match="Did you mean 'matrix'"):
        RMTConfig(stream="matrx")


def test_the_text_generation_pipeline_runs_on_single_prompts_and_batches(exported, model):
    from transformers import pipeline

    tokenizer = AutoTokenizer.from_pretrained(exported)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    alone = generate("the stream of", do_sample=False)[0]["generated_text"]
    assert alone.startswith("the stream of")
    both = generate(["the stream of", "keys"], do_sample=False, batch_size=2)
    assert both[0][0]["generated_text"] == alone


def test_the_trainer_fine_tunes_an_exported_model_and_the_loss_falls(exported, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    texts = ["values point to keys that every layer has written", "a token is read"] * 40
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="steps", save_steps=20,
        gradient_checkpointing=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    saved = load_model(tmp_path / "checkpoint-20")
    tuned = saved.model.unembedding.weight_WD
    assert torch.equal(tuned, model.model.network.unembedding.weight_WD)

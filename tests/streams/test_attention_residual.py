"""Attention residuals, full and in blocks: equations written out, and the initial average."""

import naive
import pytest
import torch

import rmt


def run(parts: naive.Parts, block: int) -> torch.Tensor:
    """Core by core, the sources recomputed each time from the list of all outputs."""
    outputs = []

    def read(cores_done):
        sums = (sum(outputs[start : min(start + block, cores_done)]) for start in range(0, cores_done, block))
        sources = [parts.embed(), *sums]
        if len(sources) == 1:
            return sources[0]
        w = parts[f"stream.{cores_done}.attend.query_1D"][0]
        scores = torch.stack([parts.rms(v) @ w for v in sources], dim=-1)
        weights = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
        return sum(weights[:, i, None] * v for i, v in enumerate(sources))

    for core in range(2 * parts.config.layers):
        y = parts.core(core, read(core))
        outputs.append(y)
    return parts.logits(read(2 * parts.config.layers))


def test_attention_residual_follows_its_equations():
    model = naive.model("attention_residual")
    naive.assert_equal(naive.logits_of(model), run(naive.Parts(model), block=1))


@pytest.mark.parametrize(("blocks", "block"), [(1, 8), (3, 3), (4, 2)])
def test_attention_residual_block_follows_its_equations(blocks, block):
    model = naive.model("attention_residual_block", residual_blocks=blocks)
    naive.assert_equal(naive.logits_of(model), run(naive.Parts(model), block))


def test_as_many_blocks_as_cores_is_the_full_form():
    full = naive.model("attention_residual")
    block = rmt.build(naive.config("attention_residual_block", residual_blocks=8), dtype=torch.float64)
    block.load_state_dict(full.state_dict())
    assert torch.equal(naive.logits_of(full), naive.logits_of(block))


def test_attention_residual_starts_as_a_plain_average():
    model = rmt.build(naive.config("attention_residual"))
    queries = [parameter for name, parameter in model.named_parameters() if "query_1D" in name]
    assert len(queries) == 8
    assert not any(query.any() for query in queries)

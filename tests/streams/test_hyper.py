"""Hyper-connections and their constrained form: equations written out, identity setting, constraints, decay."""

import naive
import pytest
import torch

import rmt
from rmt.streams.hyper import sinkhorn
from rmt.theory.mup import roles_of
from rmt.train.optimizer import build_optimizer

HYPER = ["hyper", "hyper_dynamic", "mhc"]


def run(parts: naive.Parts, coefficients) -> torch.Tensor:
    """The rule that all three share, for one token and one residual vector at a time."""
    N = parts.config.hyper_streams
    S = [parts.embed() for _ in range(N)]
    for core in range(2 * parts.config.layers):
        read, mix, write = coefficients(core, torch.stack(S, dim=1))  # [T, N], [T, N, N], [T, N]
        y = parts.core(core, sum(read[:, i, None] * S[i] for i in range(N)))
        S = [sum(mix[:, i, j, None] * S[i] for i in range(N)) + write[:, j, None] * y for j in range(N)]
    return parts.logits(sum(S) / N)


@pytest.mark.parametrize("streams", [1, 3])
def test_hyper_follows_its_equations(streams):
    model = naive.model("hyper", hyper_streams=streams)
    parts = naive.Parts(model)

    def coefficients(core, S):
        A, B = (parts[f"stream.{core}.connections.{name}"].expand(len(S), *shape) for name, shape in names)
        return A[:, :, 0], A[:, :, 1:], B

    names = [("mix_NM", (streams, streams + 1)), ("write_N", (streams,))]
    naive.assert_equal(naive.logits_of(model), run(parts, coefficients))


def test_hyper_dynamic_follows_its_equations():
    model = naive.model("hyper_dynamic", hyper_streams=3)
    parts = naive.Parts(model)

    def coefficients(core, S):
        name = f"stream.{core}.connections"
        change = torch.tanh(parts.norm(S, f"{name}.norm.gain") @ parts[f"{name}.weight"].T)  # [T, N, N + 2]
        A = parts[f"{name}.mix_NM"] + parts[f"{name}.scale"][0] * change[:, :, :-1]
        B = parts[f"{name}.write_N"] + parts[f"{name}.scale"][1] * change[:, :, -1]
        return A[:, :, 0], A[:, :, 1:], B

    naive.assert_equal(naive.logits_of(model), run(parts, coefficients))


def test_mhc_follows_its_equations():
    model = naive.model("mhc", hyper_streams=3)
    parts = naive.Parts(model)

    def coefficients(core, S):
        name, T = f"stream.{core}.connections", len(S)
        z = parts.rms(S.reshape(T, -1)) @ parts[f"{name}.weight"].T
        scale, bias = parts[f"{name}.scale"], parts[f"{name}.bias"]
        read = torch.sigmoid(scale[0] * z[:, :3] + bias[:3])
        write = 2 * torch.sigmoid(scale[1] * z[:, 3:6] + bias[3:6])
        mix = torch.exp(scale[2] * z[:, 6:] + bias[6:]).reshape(T, 3, 3)
        for _ in range(20):
            mix = mix / mix.sum(2, keepdim=True)
            mix = mix / mix.sum(1, keepdim=True)
        for one in mix:  # the rounding, in place
            for row in one:
                row *= min(1.0, 1 / row.sum().item())
            row_lack, column_lack = 1 - one.sum(1), 1 - one.sum(0)
            one += torch.outer(row_lack, column_lack) / row_lack.sum()
        return read, mix, write

    naive.assert_equal(naive.logits_of(model), run(parts, coefficients))


@pytest.mark.parametrize("stream", HYPER)
def test_hyper_connections_at_their_initial_values_are_the_transformer(stream):
    plain, hyper = (rmt.build(naive.config(name), dtype=torch.float64) for name in ("vector", stream))
    naive.assert_equal(naive.logits_of(hyper), naive.logits_of(plain), tolerance=1e-6)
    in_float32 = [naive.logits_of(rmt.build(naive.config(name))) for name in (stream, "vector")]
    naive.assert_equal(*in_float32, tolerance=1e-5 if stream == "mhc" else 1e-6)


def test_static_hyper_connections_at_their_initial_values_are_the_transformer_to_the_last_bit():
    plain, hyper = (naive.logits_of(rmt.build(naive.config(name))) for name in ("vector", "hyper"))
    assert torch.equal(plain, hyper)


@pytest.mark.parametrize("stream", HYPER)
def test_the_residual_vectors_do_not_stay_equal(stream):
    """Were the start symmetric in the residual vectors, they would learn the same and be one vector forever."""
    model = rmt.build(naive.config(stream))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([naive.IDS])
    states = []
    model.stream[-1].register_forward_hook(lambda module, inputs, output: states.append(output[0][0].detach()))
    for _ in range(3):
        model(ids, targets=ids.roll(-1, 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    spread = [(S_BTND - S_BTND.mean(-2, keepdim=True)).abs().max() for S_BTND in states]
    assert spread[0] < 1e-5 < spread[-1]


@pytest.mark.parametrize("size", [0.5, 5.0, 300.0])
def test_sinkhorn_gives_rows_and_columns_that_sum_to_one(size):
    mixed = sinkhorn(torch.randn(1000, 4, 4) * size)
    assert mixed.dtype == torch.float32
    assert (mixed >= 0).all()
    for axis in (-1, -2):
        torch.testing.assert_close(mixed.sum(axis), torch.ones(1000, 4), rtol=0, atol=1e-5)


def test_sinkhorn_stays_finite_where_exponentials_would_not():
    logits = (torch.randn(100, 4, 4) * 300).requires_grad_()
    sinkhorn(logits).square().sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def residual_mixing(model: rmt.LanguageModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """H_res of every core, captured from a forward pass."""
    found = []
    originals = {}
    for boundary in model.stream[:-1]:
        connections = boundary.connections
        originals[connections] = connections.coefficients

        def capture(S_BTND, original=connections.coefficients):
            mix_NM, write_N = original(S_BTND)
            found.append(mix_NM[..., 1:].detach())
            return mix_NM, write_N

        connections.coefficients = capture
    with torch.no_grad():
        model(ids)
    for connections in originals:
        del connections.coefficients
    return found


@pytest.mark.parametrize("start", ["initial", "mixing"])
def test_mhc_mixes_by_doubly_stochastic_matrices(start):
    model = rmt.build(naive.config("mhc", hyper_streams=4))
    with torch.no_grad():
        for boundary in model.stream[:-1] if start == "mixing" else ():
            connections = boundary.connections
            connections.weight.normal_(std=0.05)
            connections.scale.fill_(1.0)
            connections.bias[8:].normal_(std=0.5)
    matrices = residual_mixing(model, torch.tensor([naive.IDS]))
    assert len(matrices) == 8
    for mix_BTNN in matrices:
        for axis in (-1, -2):
            sums = mix_BTNN.sum(axis)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


def test_mhc_computes_its_coefficients_in_float32_under_autocast():
    model = rmt.build(naive.config("mhc"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        matrices = residual_mixing(model, torch.tensor([naive.IDS]))
    assert all(mix_BTNN.dtype == torch.float32 for mix_BTNN in matrices)


@pytest.mark.slow
def test_mhc_trains_200_steps_at_a_high_learning_rate_with_finite_gradients():
    model = rmt.build(naive.config("mhc", layers=2, hyper_streams=4, context=16))
    optimizer = build_optimizer(model, rmt.TrainConfig(lr=1e-2))
    ids = torch.randint(31, (8, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(200):
        loss = model(ids, targets=ids.roll(-1, 1)).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    for mix_BTNN in residual_mixing(model, ids):
        for axis in (-1, -2):
            sums = mix_BTNN.sum(axis)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("stream", "low", "high"), [("hyper", 576, 576), ("mhc", 1_760_000, 1_790_000)])
def test_hyper_connections_add_few_parameters_at_gpt2_small_dimensions(stream, low, high):
    added = rmt.count(rmt.ModelConfig(stream=stream)).params - rmt.count(rmt.ModelConfig(stream="vector")).params
    assert low <= added <= high


@pytest.mark.parametrize("stream", HYPER)
def test_constants_of_the_connections_do_not_decay_and_their_weights_do(stream):
    decays = {
        name.rpartition(".")[2]: role.decays
        for name, role in roles_of(rmt.build(naive.config(stream))).items()
        if "connections" in name
    }
    assert {name: decay for name, decay in decays.items() if decay} == ({} if stream == "hyper" else {"weight": True})

import pytest
import torch

from nanovllm.layers import sampler


@pytest.fixture
def sampling():
    from nanovllm.kernels import sampling

    return sampling


def rows(device, temperatures, seed=0):
    """Sampling parameters of some rows: (temperatures, seeds, positions)."""
    generator = torch.Generator().manual_seed(seed)
    count = len(temperatures)
    seeds = torch.randint(-(2**31), 2**31, (count, 2), generator=generator, dtype=torch.int64)
    positions = torch.randint(0, 40_000, (count,), generator=generator)
    return (
        torch.tensor(temperatures, dtype=torch.float32, device=device),
        seeds.to(device=device, dtype=torch.int32),
        positions.to(device=device, dtype=torch.int32),
    )


@pytest.mark.parametrize("vocab_start", [0, 1000])
@pytest.mark.parametrize("num_rows", [3, 10])  # both launch shapes
def test_sample_equals_twin(device, dtype, randn, count_launches, sampling, num_rows, vocab_start):
    kernels = [count_launches(sampling, name) for name in ("_chunk_max_kernel", "_pick_kernel")]
    logits = 3 * randn(num_rows, 5000, dtype=dtype)
    parameters = rows(device, [0.0, 1.0, 0.6, 2.0, 1e-5, 0.1, 1.0, 0.0, 0.9, 5.0][:num_rows])
    scores, ids = sampling.sample(logits, *parameters, vocab_start, 4900)
    expected_scores, expected_ids = sampler.sample(logits, *parameters, vocab_start, 4900)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-4)
    assert ids.tolist() == expected_ids.tolist()
    assert [kernel.launches for kernel in kernels] == [1, 1]


def test_shards_agree_with_the_whole(device, randn, sampling):
    """Tensor parallelism: the best of the shards' (score, id) pairs is the unsharded token."""
    logits = randn(4, 3000)
    parameters = rows(device, [1.0, 0.7, 0.0, 3.0])
    scores, ids = sampling.sample(logits, *parameters, 0, 3000)
    shards = [
        sampling.sample(logits[:, a:b].contiguous(), *parameters, a, b - a)
        for a, b in ((0, 1700), (1700, 3000))
    ]
    shard_scores = torch.stack([score for score, _ in shards])
    best = shard_scores.argmax(0)
    assert torch.equal(shard_scores.max(0).values, scores)
    assert torch.equal(torch.stack([i for _, i in shards]).gather(0, best[None])[0], ids)


def test_ties_go_to_the_lowest_id(device, dtype, sampling):
    logits = torch.zeros(2, 2500, dtype=dtype, device=device)
    logits[0, [1030, 1029, 2100, 2300]] = 1.0
    _, ids = sampling.sample(logits, *rows(device, [0.0, 0.0]), 0, 2500)
    assert ids.tolist() == [1029, 0]


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-9, 1e-11])
def test_cold_rows_are_finite(device, sampling, temperature):
    """Half-precision scaling of logits by tiny temperatures gave NaN elsewhere."""
    logits = torch.linspace(-60, 60, 700, device=device)[None].flip(1).contiguous()
    logits[0, 300] = 61.0
    scores, ids = sampling.sample(logits, *rows(device, [temperature]), 0, 700)
    assert torch.isfinite(scores).all()
    assert ids.item() == 300


def test_padding_columns_never_win(device, dtype, sampling):
    logits = torch.zeros(3, 2048, dtype=dtype, device=device)
    logits[:, 1500:] = float("inf")
    logits[2] = float("nan")
    _, ids = sampling.sample(logits, *rows(device, [0.0, 1.0, 1.0]), 0, 1500)
    assert ids.max().item() < 1500
    scores, _ = sampling.sample(logits, *rows(device, [0.0, 1.0, 1.0]), 2048, 0)
    assert torch.isneginf(scores).all()


def test_a_token_does_not_depend_on_the_batch(device, randn, sampling):
    logits = randn(12, 1500)
    parameters = rows(device, [1.0] * 12)
    scores, ids = sampling.sample(logits, *parameters, 0, 1500)
    alone_scores, alone_ids = sampling.sample(
        logits[7:8], *(parameter[7:8] for parameter in parameters), 0, 1500
    )
    assert torch.equal(alone_scores, scores[7:8])
    assert torch.equal(alone_ids, ids[7:8])


@pytest.mark.gpu
def test_frequencies_match_the_softmax(sampling):
    """Chi-square of 200,000 draws with the hardware logarithm; false alarm about 1e-6."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, -0.5], device="cuda")
    count = 200_000
    positions = torch.arange(count, dtype=torch.int32, device="cuda")
    seeds = torch.full((count, 2), 12345, dtype=torch.int32, device="cuda")
    temperatures = torch.full((count,), 0.8, device="cuda")
    num_drawn = torch.zeros(8, dtype=torch.float64)
    for part in torch.arange(count, device="cuda").split(50_000):
        _, ids = sampling.sample(
            logits.expand(len(part), 8).contiguous(),
            temperatures[part],
            seeds[part],
            positions[part],
            0,
            8,
        )
        num_drawn += ids.long().bincount(minlength=8).double().cpu()
    expected = (logits.double() / 0.8).softmax(0).cpu() * count
    assert ((num_drawn - expected) ** 2 / expected).sum().item() < 40.5

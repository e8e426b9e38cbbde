"""The torch sampler: the exact noise, its distribution, and what a draw may not depend on.

Statistical tests use fixed seeds, so they never flicker; with fresh seeds each would fail with
probability FALSE_ALARM although the sampler is right.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from nanovllm.layers import sampler
from nanovllm.layers.sampler import exponential_noise, sample

FALSE_ALARM = 1e-4


def draw(logits, temperature, seeds, positions, vocab_start=0, num_valid=None):
    """sample() for equal temperatures; logits [V] or [B, V]."""
    num_rows = len(positions)
    logits = logits.expand(num_rows, -1) if logits.dim() == 1 else logits
    temperatures = torch.full((num_rows,), temperature)
    return sample(logits, temperatures, seeds, positions, vocab_start, num_valid or logits.shape[1])


def numbered_seeds(count, start=0):
    seeds = torch.zeros(count, 2, dtype=torch.int32)
    seeds[:, 0] = torch.arange(start, start + count)
    return seeds


def p_value(observed, expected):
    """Of Pearson's chi-square statistic."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((observed.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def assert_distributed(ids, probabilities):
    observed = torch.bincount(ids.long(), minlength=len(probabilities)).double()
    assert p_value(observed, probabilities.double() * len(ids)) > FALSE_ALARM


def test_noise_is_the_specified_hash():
    """Written out again in numpy's unsigned arithmetic; the Triton kernels are held to the same."""
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**32, (7, 2), dtype=np.uint32)
    positions = np.array([0, 1, 2, 1000, 40_959, 131_071, 2**31 - 1], dtype=np.uint32)
    tokens = np.array([0, 1, 255, 151_935, 2**31 - 1], dtype=np.uint32)

    def mix(x):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x21F0AAAD)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0xD35A2D97)
        return x ^ (x >> np.uint32(15))

    s0 = mix(seeds[:, 0] ^ (positions * np.uint32(0x9E3779B1))) + np.uint32(0x85EBCA6B)
    s1 = mix(s0 ^ seeds[:, 1] ^ np.uint32(0x68E31DA4))
    z = tokens[None, :] + s0[:, None]
    z = z ^ (z >> np.uint32(16))
    z = z * np.uint32(0x21F0AAAD)
    z = z ^ (z >> np.uint32(15)) ^ s1[:, None]
    z = z * np.uint32(0xD35A2D97)
    z = z ^ (z >> np.uint32(15))
    uniform = ((z >> np.uint32(9)) | np.uint32(0x3F800000)).view(np.float32).astype(np.float64)
    expected = -np.log1p(-(uniform - 0.99999994))
    noise = exponential_noise(
        *(torch.from_numpy(x.view(np.int32)) for x in (seeds, positions, tokens))
    )
    np.testing.assert_allclose(noise.numpy(), expected, rtol=2e-5)


def test_noise_is_never_zero_and_never_infinite(monkeypatch):
    """A draw of exactly zero gave inf or NaN scores: check all 2^23 possible draws (N16)."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    real_shift = sampler._shift_right
    monkeypatch.setattr(
        sampler, "_shift_right", lambda x, bits: mantissas if bits == 9 else real_shift(x, bits)
    )
    noise = exponential_noise(
        numbered_seeds(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    )
    assert noise.min() > 0
    assert noise.max() < 17
    assert (noise.diff() > -1e-6).all()


@pytest.mark.parametrize("extreme", [5.96e-8, 16.7])
def test_extreme_noise_still_gives_the_only_possible_token(extreme, monkeypatch):
    monkeypatch.setattr(
        sampler,
        "exponential_noise",
        lambda seeds, positions, tokens: torch.full((len(positions), len(tokens)), extreme),
    )
    logits = torch.full((9,), float("-inf"))
    logits[4] = 0.0
    _, ids = draw(logits, 1.0, numbered_seeds(3), torch.arange(3, dtype=torch.int32))
    assert ids.tolist() == [4, 4, 4]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_frequencies_follow_softmax_over_positions_and_over_seeds(temperature):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    probabilities = torch.softmax(logits / temperature, dim=0)
    count = 100_000
    steps = torch.arange(count, dtype=torch.int32)
    one_seed = torch.tensor([[12345, -678]], dtype=torch.int32).expand(count, 2)
    assert_distributed(draw(logits, temperature, one_seed, steps)[1], probabilities)
    one_position = torch.full((count,), 77, dtype=torch.int32)
    assert_distributed(
        draw(logits, temperature, numbered_seeds(count), one_position)[1], probabilities
    )


def test_a_large_flat_vocabulary_is_covered_evenly():
    logits = torch.zeros(4096)
    ids = draw(logits, 1.0, numbered_seeds(4000), torch.arange(4000, dtype=torch.int32))[1]
    assert_distributed(ids // 64, torch.full((64,), 1 / 64))


@pytest.mark.parametrize("neighbour", ["position", "seed"])
def test_neighbouring_draws_are_independent(neighbour):
    count = 64_000
    steps = torch.arange(count, dtype=torch.int32)
    if neighbour == "position":
        ids = draw(torch.zeros(8), 1.0, numbered_seeds(1).expand(count, 2), steps)[1]
    else:
        ids = draw(torch.zeros(8), 1.0, numbered_seeds(count), torch.zeros_like(steps))[1]
    assert_distributed(ids[0::2] * 8 + ids[1::2], torch.full((64,), 1 / 64))


def test_a_draw_depends_only_on_its_own_row():
    """Upstream draws from one global stream, so that a neighbour changes a request's tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(16, 301, generator=generator) * 2
    temperatures = torch.rand(16, generator=generator) + 0.2
    temperatures[::5] = 0
    seeds = torch.randint(-(2**31), 2**31, (16, 2), generator=generator).int()
    positions = torch.randint(0, 4096, (16,), generator=generator).int()
    scores, ids = sample(logits, temperatures, seeds, positions, 0, 301)
    order = torch.randperm(16, generator=generator)
    shuffled = sample(logits[order], temperatures[order], seeds[order], positions[order], 0, 301)
    assert torch.equal(shuffled[0], scores[order])
    assert torch.equal(shuffled[1], ids[order])
    for i in range(16):
        row = slice(i, i + 1)
        alone = sample(logits[row], temperatures[row], seeds[row], positions[row], 0, 301)
        assert (alone[0].item(), alone[1].item()) == (scores[i].item(), ids[i].item())


def test_both_halves_of_the_seed_and_the_position_matter():
    logits = torch.zeros(100_000)
    seeds = torch.tensor([[1, 1], [2, 1], [1, 2], [1, 1]], dtype=torch.int32)
    positions = torch.tensor([5, 5, 5, 6], dtype=torch.int32)
    assert len(set(draw(logits, 1.0, seeds, positions)[1].tolist())) == 4


@pytest.mark.parametrize("bounds", [(0, 501, 1001), (0, 334, 668, 1001), (0, 1, 1001)])
def test_shards_of_the_vocabulary_reduce_to_the_whole(bounds):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(12, 1001, generator=generator)
    temperatures = torch.tensor([0.0, 0.7, 1.0, 1.5] * 3)
    seeds = torch.randint(-(2**31), 2**31, (12, 2), generator=generator).int()
    positions = torch.arange(12, dtype=torch.int32)
    whole = sample(logits, temperatures, seeds, positions, 0, 1001)
    shards = [
        sample(
            torch.cat((logits[:, a:b], torch.full((12, 3), 1e9)), dim=1),  # padding, never chosen
            temperatures,
            seeds,
            positions,
            a,
            b - a,
        )
        for a, b in pairwise(bounds)
    ]
    scores, ids = (torch.stack(x) for x in zip(*shards, strict=True))
    best = scores.max(dim=0)
    assert torch.equal(best.values, whole[0])
    assert torch.equal(ids.gather(0, best.indices[None])[0], whole[1])


def test_a_shard_without_tokens_never_wins():
    scores, ids = draw(
        torch.ones(2, 4), 0.0, numbered_seeds(2), torch.zeros(2, dtype=torch.int32), 8, None
    )
    assert ids.tolist() == [8, 8]
    temperatures, positions = torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.int32)
    scores, ids = sample(torch.ones(2, 4), temperatures, numbered_seeds(2), positions, 8, 0)
    assert scores.tolist() == [float("-inf")] * 2
    assert (scores.dtype, ids.dtype) == (torch.float32, torch.int32)


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.full((3, 400), -1.0)
    logits[0, [7, 8, 399]] = 5.0
    logits[1, [399]] = 5.0
    ids = draw(logits, 0.0, numbered_seeds(3), torch.zeros(3, dtype=torch.int32))[1]
    assert ids.tolist() == [7, 399, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-5, 1e-6, 1e-9, 1e-11, 1e-38])
def test_tiny_temperatures_stay_finite_and_become_argmax(temperature, dtype):
    """Dividing logits by 1e-5 in half precision gave NaN and blank output elsewhere (V7)."""
    logits = torch.linspace(-60, 60, 121).roll(40).to(dtype).repeat(8, 1)
    positions = torch.arange(8, dtype=torch.int32)
    scores, ids = draw(logits, temperature, numbered_seeds(8), positions)
    assert torch.isfinite(scores).all()
    assert ids.tolist() == [int(logits[0].argmax())] * 8


def test_below_the_threshold_even_close_logits_are_argmax():
    logits = torch.tensor([1.0, 1.00001, 0.99999])
    for temperature, expected in ((9e-5, {1}), (1.1e-4, {0, 1, 2})):
        ids = draw(logits, temperature, numbered_seeds(500), torch.arange(500).int())[1]
        assert set(ids.tolist()) == expected


def test_greedy_and_random_rows_mix_in_one_batch():
    """Greedy was dropped upstream because its division had no guard (N31)."""
    logits = torch.tensor([0.4, 0.1, 1.0, 0.9, -2.0])
    count = 100_000
    temperatures = torch.tensor([0.0, 0.8]).repeat(count)
    positions = torch.arange(2 * count, dtype=torch.int32)
    seeds = numbered_seeds(1).expand(2 * count, 2)
    ids = sample(logits.expand(2 * count, -1), temperatures, seeds, positions, 0, 5)[1]
    assert (ids[0::2] == 2).all()
    assert_distributed(ids[1::2], torch.softmax(logits / 0.8, dim=0))


def test_greedy_rows_cost_no_noise(monkeypatch):
    def fail(*args):
        raise AssertionError("noise for a greedy batch")

    monkeypatch.setattr(sampler, "exponential_noise", fail)
    draw(torch.zeros(4, 9), 0.0, numbered_seeds(4), torch.zeros(4, dtype=torch.int32))


def test_slicing_of_large_batches_changes_nothing(monkeypatch):
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(5))
    arguments = (logits, 0.9, numbered_seeds(9), torch.arange(9, dtype=torch.int32))
    whole = draw(*arguments)
    monkeypatch.setattr(sampler, "_CHUNK_ELEMENTS", 100)
    for expected, sliced in zip(whole, draw(*arguments), strict=True):
        assert torch.equal(expected, sliced)


def test_inputs_and_global_random_state_are_left_alone(torch_globals):
    before = torch_globals()
    logits = torch.ones(3, 7)
    draw(logits, 1.0, numbered_seeds(3), torch.arange(3, dtype=torch.int32))
    assert (logits == 1).all()
    assert torch_globals() == before

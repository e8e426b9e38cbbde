"""Sums and best tokens exchanged through memory that all ranks write to; here one rank at a time.

A rank that runs alone has sent its message when it finds `abandoned` set and stops waiting, so the
last rank to run finds everybody's message. Ranks that wait for one another for real are the
business of tests/gpu.
"""

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels import peer_exchange  # noqa: E402
from nanovllm.kernels.peer_exchange import PeerExchange, exchange_bytes  # noqa: E402
from nanovllm.layers.layernorm import add_rms_norm, rms_norm  # noqa: E402
from nanovllm.utils.distributed import SharedMemory  # noqa: E402

MAX_SEQS, EPS = 8, 1e-6


class Ranks:
    """The exchanges of `size` ranks, all on one device."""

    def __init__(self, size, width, device):
        num_words = exchange_bytes(size, MAX_SEQS, width) // 2
        self.inboxes = [
            torch.full((num_words,), -0x8000, dtype=torch.int16, device=device) for _ in range(size)
        ]
        self.abandoned = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(size)]
        addresses = [inbox.data_ptr() for inbox in self.inboxes]
        self.exchanges = [
            PeerExchange(rank, SharedMemory(addresses, abandoned), device, MAX_SEQS, width)
            for rank, abandoned in enumerate(self.abandoned)
        ]

    def each_last_once(self, call):
        """Run `call(rank, exchange, is_last)` for all ranks, each of them once as the last."""
        for last in range(len(self.exchanges)):
            for inbox in self.inboxes:
                inbox.fill_(-0x8000)
            order = [rank for rank in range(len(self.exchanges)) if rank != last] + [last]
            for rank in order:
                self.abandoned[rank].fill_(rank != last)
                call(rank, self.exchanges[rank], rank == last)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setattr(peer_exchange, "_SPINS", type(peer_exchange._SPINS)(1))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("add", [True, False])
def test_reduce_add_rms_norm(size, width, add, device, randn, count_launches):
    kernel = count_launches(peer_exchange, "_reduce_kernel")
    ranks, num_rows = Ranks(size, width, device), 3
    weight = randn(width, dtype=torch.bfloat16)
    parts = [randn(num_rows, width, dtype=torch.bfloat16) for _ in range(size)]
    parts[0][0, 0] = parts[1][0, 0] = -0.0  # the bits that stand for what has not arrived
    residual = randn(num_rows, width, dtype=torch.bfloat16)
    total = sum(part.float() for part in parts)
    if add:
        wanted = add_rms_norm(total, residual.float(), weight.float(), EPS)
    else:
        wanted = rms_norm(total, weight.float(), EPS), total

    def call(rank, exchange, is_last):
        stream, out = residual.clone(), torch.empty_like(residual)
        exchange.reduce_add_rms_norm(parts[rank], stream, weight, out, EPS, add=add)
        if is_last:
            for got, want in zip((out, stream), wanted, strict=True):
                torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)
            assert (ranks.inboxes[rank] == -0x8000).all()

    ranks.each_last_once(call)
    assert kernel.launches == size * size


def test_own_part_need_not_be_a_copy_of_the_stream(device, randn):
    """The embeddings' sum is written over this rank's part of it."""
    ranks = Ranks(2, 64, device)
    parts = [randn(2, 64, dtype=torch.bfloat16) for _ in range(2)]
    weight = torch.ones(64, dtype=torch.bfloat16, device=device)

    def call(rank, exchange, is_last):
        stream = parts[rank].clone()
        exchange.reduce_add_rms_norm(
            stream, stream, weight, torch.empty_like(stream), EPS, add=False
        )
        if is_last:
            torch.testing.assert_close(stream, parts[0] + parts[1], rtol=1e-2, atol=1e-2)

    ranks.each_last_once(call)


@pytest.mark.parametrize("size", [2, 3])
def test_best_of_ranks(size, device, count_launches):
    kernel = count_launches(peer_exchange, "_best_kernel")
    ranks, nan = Ranks(size, 64, device), float("nan")
    scores = torch.tensor(
        [[1.0, -2.0, 3.0, nan, 0.0], [2.0, -3.0, 3.0, 1.0, -0.0], [0.0, -1.0, 4.0, 2.0, 0.0]]
    )[:size]
    ids = torch.tensor([[5, 6, 7, 8, 9], [50, 60, 70, 80, 90], [500, 600, 700, 800, 900]])[:size]
    wanted = [50, 6, 7, 8, 9] if size == 2 else [50, 600, 700, 8, 9]

    def call(rank, exchange, is_last):
        own = ids[rank].to(device, torch.int32)
        exchange.best_of_ranks(scores[rank].to(device), own)
        if is_last:
            assert own.tolist() == wanted
            assert (ranks.inboxes[rank] == -0x8000).all()

    ranks.each_last_once(call)
    assert kernel.launches == size * size


def test_slots_take_turns(device):
    """A message that came early does not disturb the one before it."""
    ranks = Ranks(2, 64, device)
    scores = torch.ones(1, device=device)

    def call(rank, score, is_alone):
        ranks.abandoned[rank].fill_(is_alone)
        ids = torch.tensor([rank], dtype=torch.int32, device=device)
        ranks.exchanges[rank].best_of_ranks(scores * score, ids)
        return ids.item()

    call(1, 2.0, True)
    call(1, 0.0, True)
    assert [call(0, 1.0, False), call(0, 1.0, False)] == [1, 0]


@pytest.mark.parametrize(("size", "max_rows"), [(2, 512), (8, 73)])
def test_more_rows_than_pay_are_left_to_nccl(size, max_rows):
    """Everybody sends everything to everybody, 8 MiB at most."""
    memory = SharedMemory([0] * size, torch.zeros(1, dtype=torch.int32))
    exchange = PeerExchange(0, memory, torch.device("cpu"), max_num_seqs=512, hidden_size=8192)
    assert exchange.max_rows == max_rows

"""gloo by itself, with threads as ranks: its time limits, and where gathered rows lie."""

import datetime
import threading

import pytest
import torch

from nanovllm.utils import gloo
from nanovllm.utils.distributed import CommunicationError, TPGroup
from nanovllm.utils.gloo import GlooCommunicator


@pytest.fixture
def on_two_ranks(tmp_path):
    """on_two_ranks(function) -> what function(tp) returned on rank 0 and on rank 1."""
    results = [None, None]

    def work(function, rank):
        communicator = GlooCommunicator(rank, 2, str(tmp_path))
        communicator.connect()
        results[rank] = function(TPGroup(rank, 2, communicator))

    def run(function):
        threads = [threading.Thread(target=work, args=(function, rank)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return run


def test_connecting_to_a_rank_that_is_gone_ends_early(tmp_path, monkeypatch):
    monkeypatch.setattr(gloo, "_CONNECT_TIMEOUT", datetime.timedelta(seconds=0.5))
    with pytest.raises(CommunicationError, match="could not connect"):
        GlooCommunicator(0, 2, str(tmp_path)).connect()


def test_collectives_may_wait_longer_than_connecting(on_two_ranks, monkeypatch):
    """A rank that prefills for minutes is not a dead one."""
    monkeypatch.setattr(gloo, "_CONNECT_TIMEOUT", datetime.timedelta(seconds=0.5))

    def reduce_late(tp):
        if tp.rank == 1:
            threading.Event().wait(1.0)
        return tp.all_reduce(torch.ones(3)).tolist()

    assert on_two_ranks(reduce_late) == [[2.0] * 3] * 2


def test_gathered_tensors_lie_one_after_the_other_for_any_batch(on_two_ranks):
    """A layout that was right for one row only gave wrong logits for more."""

    def gather(tp):
        rows = [torch.arange(n * 3).view(n, 3) + 100 * tp.rank for n in (1, 2, 7)]
        return [tp.all_gather(x.t()) for x in rows]  # transposed, so not contiguous

    for gathered in on_two_ranks(gather):
        for n, x in zip((1, 2, 7), gathered, strict=True):
            first = torch.arange(n * 3).view(n, 3).t()
            assert torch.equal(x, torch.stack([first, first + 100]))

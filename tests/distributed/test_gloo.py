"""gloo's time limits, with threads as ranks."""

import datetime
import threading

import pytest
import torch

from nanovllm.utils import gloo
from nanovllm.utils.distributed import CommunicationError
from nanovllm.utils.gloo import GlooCommunicator


@pytest.fixture(autouse=True)
def little_time_to_connect(monkeypatch):
    monkeypatch.setattr(gloo, "_CONNECT_TIMEOUT", datetime.timedelta(seconds=0.5))


def test_connecting_to_a_rank_that_is_gone_ends_early(tmp_path):
    with pytest.raises(CommunicationError, match="could not connect"):
        GlooCommunicator(0, 2, str(tmp_path)).connect()


def test_collectives_may_wait_longer_than_connecting(tmp_path):
    """A rank that prefills for minutes is not a dead one."""
    ranks = [GlooCommunicator(rank, 2, str(tmp_path)) for rank in range(2)]
    tensors = [torch.ones(3), torch.ones(3)]
    is_late = threading.Event()

    def work(rank):
        ranks[rank].connect()
        if rank == 1:
            is_late.wait(1.0)  # nobody sets it
        ranks[rank].all_reduce(tensors[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.abort()
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2

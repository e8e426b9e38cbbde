"""Two ranks on two GPUs in this process: what their kernels compute, one GPU and torch as judges.

Ranks as processes, and how they end, are test_tp_on_gpus.py's.
"""

import threading
import time
from concurrent.futures import Future, wait

import pytest
import torch
from decode_models import Batch, row_errors

from nanovllm.layers.attention.triton import TritonAttention
from nanovllm.layers.layernorm import rms_norm
from nanovllm.layers.ops import triton_ops
from nanovllm.models.config import load_decoder_config
from nanovllm.models.decoder import CausalLM
from nanovllm.models.fast_decode import FastDecode
from nanovllm.utils.distributed import SharedMemory, TPGroup
from nanovllm.utils.loader import load_weights
from nanovllm.utils.nccl import NcclCommunicator, new_unique_id

pytest.importorskip("triton")

from nanovllm.kernels.peer_exchange import PeerExchange, exchange_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

DEVICES = [torch.device("cuda", rank) for rank in range(2)]
SHAPE = {"tied": False, "head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
MAX_LEN = 1024  # positions of the checkpoint
PATIENCE_S = 60.0
EPS = 1e-6


class Memory:
    """What ranks share: here two tensors, since a process cannot open its own CUDA IPC handles."""

    def __init__(self, max_num_seqs, width, abandoned=0):
        for source, target in (DEVICES, DEVICES[::-1]):
            torch.zeros(1, device=source).to(target)  # torch then lets the one reach the other
        num_words = exchange_bytes(2, max_num_seqs, width) // 2
        self.inboxes = [
            torch.full((num_words,), -0x8000, dtype=torch.int16, device=device)
            for device in DEVICES
        ]
        self.abandoned = torch.full((1,), abandoned, dtype=torch.int32).pin_memory()
        shared = SharedMemory([inbox.data_ptr() for inbox in self.inboxes], self.abandoned)
        self.exchanges = [
            PeerExchange(rank, shared, device, max_num_seqs, width)
            for rank, device in enumerate(DEVICES)
        ]
        for device in DEVICES:
            torch.cuda.synchronize(device)


@pytest.fixture
def new_memory():
    """new_memory(max_num_seqs, width, abandoned=0) -> Memory; kernels end with the test."""
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the GPUs cannot reach each other")
    made = []

    def make(*sizes, **options):
        made.append(Memory(*sizes, **options))
        return made[-1]

    yield make
    for memory in made:
        memory.abandoned[0] = 1
    for device in DEVICES:
        torch.cuda.synchronize(device)


def finish(memory):
    """Wait for both GPUs; if one of them waits in vain, end that and fail."""
    events = []
    for device in DEVICES:
        with torch.cuda.device(device):
            events.append(torch.cuda.Event())
            events[-1].record()
    deadline = time.monotonic() + PATIENCE_S
    while not all(event.query() for event in events):
        if time.monotonic() > deadline:
            memory.abandoned[0] = 1
            pytest.fail("a rank waits in vain")
        time.sleep(0.001)


def run_all(calls, memory, graphs=None):
    """Rank 0 makes all its calls before rank 1 makes its first."""
    for rank, device in enumerate(DEVICES):
        with torch.cuda.device(device):
            if graphs is not None:
                graphs[rank].replay()
                continue
            for call in calls:
                call(rank, memory.exchanges[rank])
    finish(memory)


def capture_all(calls, memory):
    """One CUDA graph a rank, with all its calls."""
    graphs = []
    for rank, device in enumerate(DEVICES):
        graphs.append(torch.cuda.CUDAGraph())
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graphs[-1], stream=torch.cuda.Stream(device)),
        ):
            for call in calls:
                call(rank, memory.exchanges[rank])
    return graphs


NUM_CALLS, MAX_ROWS = 50, 70


def sizes(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, MAX_ROWS + 1, (NUM_CALLS,), generator=generator).tolist()


@pytest.mark.parametrize("width", [1024, 2560])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("in_graphs", [False, True], ids=["eager", "graphs"])
def test_fifty_sums_in_a_row(in_graphs, pdl, width, new_memory):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    rows = sizes(1)
    parts = [[draw(n, width) for n in rows] for _ in DEVICES]
    parts[0][0][0, 0] = parts[1][0][0, 0] = -0.0  # the bits that stand for what has not arrived
    residual, weight = draw(MAX_ROWS, width), draw(width)
    on_gpu = [[x.to(device) for x in parts[rank]] for rank, device in enumerate(DEVICES)]
    weights = [weight.to(device) for device in DEVICES]
    streams = [residual.to(device) for device in DEVICES]
    outs = [[torch.empty_like(x) for x in xs] for xs in on_gpu]

    def sum_number(i):
        def call(rank, exchange):
            x, out, stream = on_gpu[rank][i], outs[rank][i], streams[rank][: rows[i]]
            add = i % 7 != 3
            exchange.reduce_add_rms_norm(x, stream, weights[rank], out, EPS, add=add, pdl=pdl)

        return call

    calls = [sum_number(i) for i in range(NUM_CALLS)]
    run_all(calls, new_memory(MAX_ROWS, width, abandoned=1))  # compiles and loads
    wanted, stream = [], residual.clone()
    for i, n in enumerate(rows):
        total = parts[0][i].float() + parts[1][i].float()
        stream[:n] = total if i % 7 == 3 else total + stream[:n].float()
        wanted.append(rms_norm(stream[:n], weight, EPS))
    memory = new_memory(MAX_ROWS, width)
    graphs = capture_all(calls, memory) if in_graphs else None
    for _ in range(3):
        for rank in range(2):
            streams[rank].copy_(residual)
            for out in outs[rank]:
                out.fill_(torch.nan)
        run_all(calls, memory, graphs)
        for rank in range(2):
            assert torch.equal(streams[rank].cpu(), stream)
            for out, expected in zip(outs[rank], wanted, strict=True):
                torch.testing.assert_close(out.cpu(), expected, rtol=1.6e-2, atol=1e-2)
            assert (memory.inboxes[rank] == -0x8000).all()


@pytest.mark.parametrize("in_graphs", [False, True], ids=["eager", "graphs"])
def test_fifty_choices_in_a_row(in_graphs, new_memory):
    generator = torch.Generator().manual_seed(0)
    rows = sizes(2)
    scores = [torch.randint(0, 9, (2, n), generator=generator).float() for n in rows]  # many ties
    ids = [torch.randint(0, 1000, (2, n), generator=generator).int() for n in rows]
    on_gpu = [[score[rank].to(DEVICES[rank]) for score in scores] for rank in range(2)]
    chosen = [[x[rank].to(DEVICES[rank]) for x in ids] for rank in range(2)]

    def choice_number(i):
        return lambda rank, exchange: exchange.best_of_ranks(on_gpu[rank][i], chosen[rank][i])

    calls = [choice_number(i) for i in range(NUM_CALLS)]
    run_all(calls, new_memory(MAX_ROWS, 64, abandoned=1))
    memory = new_memory(MAX_ROWS, 64)
    graphs = capture_all(calls, memory) if in_graphs else None
    for _ in range(3):
        for rank in range(2):
            for x, y in zip(chosen[rank], ids, strict=True):
                x.copy_(y[rank])
        run_all(calls, memory, graphs)
        for i in range(NUM_CALLS):
            wanted = torch.where(scores[i][1] > scores[i][0], ids[i][1], ids[i][0])
            for rank in range(2):
                assert torch.equal(chosen[rank][i].cpu(), wanted)


class Switch:
    """A communicator that sums nothing until it is switched on.

    So that a rank compiles kernels and takes memory while no kernel of another waits for it: in one
    process that may end in a deadlock.
    """

    def __init__(self, communicator):
        self.communicator, self.is_on = communicator, False

    def all_reduce(self, x):
        if self.is_on:
            self.communicator.all_reduce(x)


class TwoRanks:
    """A checkpoint's two shares, each on its GPU, and threads that work on both at a time."""

    def __init__(self, folder):
        unique_id = new_unique_id()
        self.communicators = [
            NcclCommunicator(rank, 2, unique_id, device) for rank, device in enumerate(DEVICES)
        ]
        self.switches = [Switch(communicator) for communicator in self.communicators]
        self.models = [
            load(folder, TPGroup(rank, 2, switch), DEVICES[rank])
            for rank, switch in enumerate(self.switches)
        ]
        self.on_both(lambda rank: self.communicators[rank].connect())

    def on_both(self, work, memory=None):
        """work(rank) on both ranks at once, each in a thread with its GPU; returns the results."""
        futures = [Future() for _ in DEVICES]

        def run(rank):
            try:
                torch.cuda.set_device(DEVICES[rank])
                with torch.inference_mode():
                    result = work(rank)
                torch.cuda.synchronize(DEVICES[rank])
                futures[rank].set_result(result)
            except BaseException as error:
                futures[rank].set_exception(error)

        for rank in range(2):
            threading.Thread(target=run, args=(rank,), daemon=True).start()
        done, waiting = wait(futures, PATIENCE_S, return_when="FIRST_EXCEPTION")
        if waiting:
            if memory is not None:
                memory.abandoned[0] = 1
            self.close()
            for future in done:
                future.result()
            pytest.fail("a rank waits in vain")
        return [future.result() for future in futures]

    def both_twice(self, work, memory=None):
        """`on_both`, after a round in which no rank waits for another."""
        barrier, lock = threading.Barrier(2), threading.Lock()

        def warm_up_and_work(rank):
            self.switches[rank].is_on = False
            with lock:
                work(rank, True)
                torch.cuda.synchronize(DEVICES[rank])
            barrier.wait(PATIENCE_S)
            self.switches[rank].is_on = True
            return work(rank, False)

        return self.on_both(warm_up_and_work, memory)

    def close(self):
        threads = [
            threading.Thread(target=communicator.abort, daemon=True)
            for communicator in self.communicators
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)


def load(folder, tp, device):
    config = load_decoder_config(folder)
    model = CausalLM(config, tp, triton_ops(), TritonAttention(), device, torch.bfloat16)
    load_weights(model, folder)
    return model


def gather(shares, vocab_size):
    """The logits of both ranks' vocabularies side by side, without padding; on the CPU."""
    return torch.cat([share.float().cpu() for share in shares], dim=1)[:, :vocab_size]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    return tiny_checkpoint(**SHAPE)


@pytest.fixture(scope="module")
def ranks(folder):
    ranks = TwoRanks(folder)
    yield ranks
    ranks.close()


def test_prefill_logits_are_near_transformers(ranks, folder, reference_model, build_step):
    ids = torch.randint(3, 501, (300,), generator=torch.Generator().manual_seed(0))
    positions, meta = build_step([300], [300], [range(2)], 256)
    fields = {name: getattr(meta, name) for name in meta.__slots__}

    def prefill(rank, is_warm_up):
        device, model = DEVICES[rank], ranks.models[rank]
        own = {k: v.to(device) if torch.is_tensor(v) else v for k, v in fields.items()}
        shape = (2, 2, 2, 256, 1, 64)  # k and v, layers, blocks, block size, KV heads, head_dim
        cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        hidden = model(ids.to(device), positions.to(device), cache, type(meta)(**own))
        return model.compute_logits(hidden)

    logits = gather(ranks.both_twice(prefill), 501)
    with torch.inference_mode():
        reference = reference_model(folder)(ids[None]).logits[0]
    assert (logits - reference).norm() / reference.norm() < 0.03


@pytest.mark.parametrize("has_exchange", [True, False], ids=["exchange", "nccl"])
@pytest.mark.parametrize("batch_size", [1, 3, 40, 70])
def test_fast_steps_equal_those_of_one_rank(batch_size, has_exchange, ranks, folder, new_memory):
    lengths = [(1, 130, MAX_LEN, 64, 0, 257)[(i + 2) % 6] for i in range(batch_size)]
    with torch.inference_mode():
        whole = load(folder, TPGroup(), DEVICES[0])
        batch = Batch(whole, lengths, max_len=MAX_LEN)
        caches = [
            batch.cache[..., rank : rank + 1, :].contiguous().to(device)
            for rank, device in enumerate(DEVICES)
        ]
        expected = batch.fast(FastDecode(whole, batch.cache, batch_size, MAX_LEN)).cpu()
    inputs = [
        [x.to(device) for x in (batch.input_ids, batch.seqlens_k, batch.tables, batch.slots)]
        for device in DEVICES
    ]
    memories = [None, None]
    if has_exchange:
        memories = [new_memory(batch_size, 256, abandoned=is_warm_up) for is_warm_up in (0, 1)]
    steps = [[None, None] for _ in DEVICES]
    for rank in range(2):
        for is_warm_up, memory in enumerate(memories):
            exchange = None if memory is None else memory.exchanges[rank]
            steps[rank][is_warm_up] = FastDecode(
                ranks.models[rank], caches[rank], batch_size, MAX_LEN, exchange
            )

    def decode(rank, is_warm_up):
        num_steps = 1 if is_warm_up else 5  # the same one: what is stored is stored again
        for _ in range(num_steps):
            logits = steps[rank][is_warm_up].forward(*inputs[rank])
        return logits

    logits = gather(ranks.both_twice(decode, memories[0]), 501)
    real = batch.real.cpu()
    assert row_errors(logits[real], expected[real]).max() < 0.03
    streams = [rank_steps[0]._scratch.stream.cpu() for rank_steps in steps]
    assert torch.equal(streams[0], streams[1]), "ranks that drift apart"
    cache = torch.cat([cache.cpu() for cache in caches], dim=-2).flatten(2, 3)
    expected_cache, slots = batch.cache.cpu().flatten(2, 3), batch.slots.cpu()[real]
    new, expected_new = cache[:, :, slots], expected_cache[:, :, slots]  # [2, L, B, Hkv, D]
    assert row_errors(new.flatten(3), expected_new.flatten(3)).max() < 0.03
    cache[:, :, slots] = expected_new
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)

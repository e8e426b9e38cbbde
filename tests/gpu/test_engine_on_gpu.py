"""The whole engine on a GPU: tokens, graphs, staging buffers, memory.

Tokens are compared in float32, which decodes with plain layers; the rest runs as users run it: in
bfloat16, with the fused decode step in CUDA graphs.
"""

import ast
import contextlib
import logging
import os
import random
import subprocess
import sys

import pytest
import torch

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.staging import Staging

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}  # both kernels' shapes
SMALL = {"max_model_len": 1024, "gpu_memory_utilization": 0.1}
MAX_TOKENS = 40
LENGTHS = (1, 5, 15, 16, 17, 64, 220, 255, 256, 257, 600)


def make_prompts(lengths=LENGTHS):
    draw = random.Random(0)
    return [[draw.randrange(3, 501) for _ in range(length)] for length in lengths]


def tokens_of(llm, prompts, params):
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def generate(folder, prompts, params, **options):
    with LLM(folder, **(SMALL | options)) as llm:
        return tokens_of(llm, prompts, params)


@contextlib.contextmanager
def fast_llm(folder, **options):
    """An engine in bfloat16 whose decode steps are the fused ones, in CUDA graphs."""
    with LLM(folder, dtype="bfloat16", **(SMALL | options)) as llm:
        assert llm.engine.workers.fast_decode is not None
        assert llm.engine.workers.graphs is not None
        yield llm


@pytest.fixture
def replayed(monkeypatch):
    """replayed(llm) -> the sizes of the graphs that run from now on, in a growing list."""

    def watch(llm):
        graphs, sizes = llm.engine.workers.graphs, []
        replay = graphs.replay
        monkeypatch.setattr(graphs, "replay", lambda size: sizes.append(size) or replay(size))
        return sizes

    return watch


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint(**SHAPE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"enforce_eager": True, "max_num_seqs": 1},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 3},
        {"kvcache_block_size": 16, "num_kvcache_blocks": 48, "scheduling_policy": "mixed"},
        {"attention_backend": "reference"},
        {"fused_kernels": False},
    ],
    ids=repr,
)
def test_float32_greedy_tokens_equal_transformers(checkpoint, reference_tokens, options):
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    tokens = generate(checkpoint, make_prompts(), params, dtype="float32", **options)
    assert tokens == [reference_tokens(checkpoint, p, MAX_TOKENS) for p in make_prompts()]


def test_graphs_equal_eager_where_the_kernels_are_the_same(checkpoint, replayed):
    """Sampled tokens of plain layers in bfloat16, graph against eager, bit for bit.

    16 prompts, because matrix products may round differently in a padded batch.
    """
    prompts = make_prompts((*LENGTHS, 2, 33, 128, 300, 511))
    params = [SamplingParams(max_tokens=64, ignore_eos=True, seed=i) for i in range(16)]
    options = SMALL | {"dtype": "bfloat16", "fast_decode": False}
    with LLM(checkpoint, **options) as llm:
        sizes = replayed(llm)
        tokens = tokens_of(llm, prompts, params)
        assert sizes == [16] * 63
    assert tokens == generate(checkpoint, prompts, params, enforce_eager=True, **options)


@pytest.fixture
def plain_logits(build_step):
    """plain_logits(runner, ids, query_lens, tables) -> (the plain forward's logits, metadata).

    The new tokens are the last of the sequences `ids`; what is before them is in the cache.
    """

    def compute(runner, ids, query_lens, tables):
        lengths, block_size = [len(row) for row in ids], runner.config.kvcache_block_size
        positions, meta = build_step(query_lens, lengths, tables, block_size)
        fields = {name: getattr(meta, name) for name in meta.__slots__}
        meta = type(meta)(**{k: v.cuda() if torch.is_tensor(v) else v for k, v in fields.items()})
        new = [token for row, n in zip(ids, query_lens, strict=True) for token in row[-n:]]
        new = torch.tensor(new, device="cuda")
        hidden = runner.model(new, positions.cuda(), runner.kv_cache, meta)
        return runner.model.compute_logits(hidden).float(), meta

    return compute


def test_bfloat16_logits_are_near_transformers(checkpoint, reference_model, plain_logits):
    ids = make_prompts([300])
    with fast_llm(checkpoint) as llm, torch.inference_mode():
        logits, _ = plain_logits(llm.engine.workers, ids, [300], [range(2)])
        reference = reference_model(checkpoint)(torch.tensor(ids)).logits[0]
    error = (logits.cpu() - reference).norm() / reference.norm()
    assert error < 0.03


@pytest.mark.parametrize("lengths", [[255], [256], [257], [254, 255, 256, 257, 258]], ids=repr)
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_decode_logits_around_block_borders_are_those_of_prefill(
    checkpoint, plain_logits, backend, lengths
):
    """One cached token wrong or left out moves a row's logits by 3 to 16 % here."""
    ids = make_prompts(lengths)
    tables = [(2 * row + 2, 2 * row + 1) for row in range(len(ids))]
    ones = [1] * len(ids)
    options = {"attention_backend": backend, "num_kvcache_blocks": 16}
    with fast_llm(checkpoint, **options) as llm, torch.inference_mode():
        runner = llm.engine.workers
        runner.kv_cache.fill_(float("nan"))
        logits, meta = plain_logits(runner, ids, lengths, tables)
        expected = logits[meta.cu_seqlens_q[1:].long() - 1]
        runner.kv_cache.fill_(float("nan"))
        shorter = [row[:-1] for row in ids]
        plain_logits(runner, shorter, [len(row) for row in shorter], tables)
        before = runner.kv_cache.clone()
        plain, meta = plain_logits(runner, ids, ones, tables)
        runner.kv_cache.copy_(before)
        new_ids = torch.tensor([row[-1] for row in ids], dtype=torch.int32, device="cuda")
        wide = torch.nn.functional.pad(meta.block_tables, (0, 4 - meta.block_tables.shape[1]))
        fast = runner.fast_decode.forward(new_ids, meta.seqlens_k, wide, meta.slot_mapping).float()
    for out in (plain, fast):
        assert ((out - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.04


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 12, 100])
def test_a_full_batch_of_any_size_has_a_graph(checkpoint, max_num_seqs, replayed):
    """Once, a batch of 12 under max_num_seqs=12 had no graph to run in."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with fast_llm(checkpoint, max_num_seqs=max_num_seqs) as llm:
        sizes = replayed(llm)
        tokens = tokens_of(llm, make_prompts([16] * max_num_seqs), params)
    assert [len(ids) for ids in tokens] == [8] * max_num_seqs
    assert sizes == [max_num_seqs] * 7


@pytest.mark.parametrize(("length", "max_tokens"), [(1023, 1), (1023, 2), (1022, 2), (1020, 16)])
def test_a_sequence_ends_at_the_longest_context(checkpoint, length, max_tokens):
    """Once, a sequence outgrew the graph's block table."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with fast_llm(checkpoint) as llm:
        tokens = tokens_of(llm, make_prompts([length, 3, 16, 7]), params)
    assert len(tokens[0]) == min(max_tokens, 1024 - length)


def test_input_of_a_running_step_is_not_overwritten():
    """Once, a pinned buffer was refilled while its copy was still under way."""
    staging = Staging(EngineConfig("unused", max_num_seqs=8), 1024, torch.device("cuda"))
    copies = []
    for step in range(6):
        torch.cuda._sleep(20_000_000)  # the copies queue up behind it
        words = torch.full((4096,), step, dtype=torch.int32).numpy()
        copies.append(staging.upload(words)[:4096].clone())
    for step, copy in enumerate(copies):
        assert (copy == step).all()


def test_padded_rows_and_old_inputs_change_nothing(checkpoint, replayed):
    """A batch of 3 in a graph of 4, with garbage left in the device buffer and NaN in the cache.

    flash-attn, which wants a cache free of NaN, reads nothing of it here: decode is our kernel, and
    no prompt has a cached prefix.
    """
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = make_prompts([30, 200, 5])
    with fast_llm(checkpoint) as llm:
        clean = tokens_of(llm, prompts, params)
        runner = llm.engine.workers
        llm.engine.scheduler.block_manager.clear_cache()
        with torch.inference_mode():
            runner._staging.device_buffer.fill_(2**31 - 1)
            runner.kv_cache.fill_(float("nan"))
        sizes = replayed(llm)
        assert tokens_of(llm, prompts, params) == clean
    assert sizes == [4] * 19


def test_steady_decode_allocates_nothing_and_replays_every_step(checkpoint, replayed):
    params = SamplingParams(temperature=0.6, max_tokens=200, ignore_eos=True)
    prompts = make_prompts([16] * 16)
    with fast_llm(checkpoint) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        sizes = replayed(llm)
        llm.engine.scheduler.block_manager.clear_cache()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        llm.generate(prompts, params, use_tqdm=False)
        num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert sizes == [16] * 199
        assert llm.stats.num_decode_steps == 199
    assert num_allocations < 199  # those of the one prefill step


def test_full_memory_and_512_rows(tiny_checkpoint, monkeypatch):
    """The vocabulary of real models: logits of 512 rows are what takes the memory."""
    folder = tiny_checkpoint(vocab_size=151_936, **SHAPE)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with fast_llm(folder, gpu_memory_utilization=0.95) as llm:
        assert llm.engine.config.max_num_seqs == 512
        workers, headers = llm.engine.workers, []
        launch = workers.launch
        monkeypatch.setattr(workers, "launch", lambda b: headers.append(b.header) or launch(b))
        tokens = tokens_of(llm, make_prompts([40] * 600), params)
    assert {len(ids) for ids in tokens} == {8}
    assert [h.num_samples for h in headers if h.is_graph].count(512) >= 7


def test_no_memory_left_is_told_with_numbers(checkpoint):
    with pytest.raises(ConfigError, match=r"weights .* activations .* gpu_memory_utilization"):
        LLM(checkpoint, gpu_memory_utilization=0.001)


def test_memory_comes_back(checkpoint):
    def free_mib():
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0] >> 20

    with fast_llm(checkpoint):
        pass  # what libraries keep for good is taken now
    before = free_mib()
    for _ in range(3):
        with fast_llm(checkpoint) as llm:
            llm.generate([[5, 6, 7]], use_tqdm=False)
        llm.close()
        assert before - free_mib() < 300


def test_kernels_are_compiled_ahead(checkpoint, caplog):
    """That leans on Triton's internals; without them, kernels are compiled one by one."""
    with caplog.at_level(logging.INFO, logger="nanovllm"), fast_llm(checkpoint):
        assert "decode graphs captured" in caplog.text
        assert "compiled one by one" not in caplog.text


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("device", "current"), [("cuda:1", 0), ("cuda:0", 1)])
def test_the_engines_device_need_not_be_the_current_one(checkpoint, device, current):
    """Triton's launches, events and graphs go to the current device, whatever tensors are on.

    In a fresh process, since torch keeps the stream of its first capture.
    """
    text = (
        "import torch\n"
        "from nanovllm import LLM, SamplingParams\n"
        f"torch.cuda.set_device({current})\n"
        "params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)\n"
        f"options = dict(dtype='bfloat16', device={device!r}, **{SMALL!r})\n"
        f"with LLM({str(checkpoint)!r}, **options) as llm:\n"
        "    assert llm.engine.workers.fast_decode is not None\n"
        f"    outputs = llm.generate({make_prompts()!r}, params, use_tqdm=False)\n"
        f"assert torch.cuda.current_device() == {current}\n"
        "print([output['token_ids'] for output in outputs])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with fast_llm(checkpoint) as llm:
        assert ast.literal_eval(done.stdout) == tokens_of(llm, make_prompts(), params)

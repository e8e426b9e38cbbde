"""The whole model's float32 logits against transformers, through a paged cache full of NaN."""

import threading

import pytest
import torch

from nanovllm.layers.attention import select_backend
from nanovllm.layers.ops import select_ops
from nanovllm.models.config import load_decoder_config
from nanovllm.models.decoder import CausalLM
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.integers import divide_up
from nanovllm.utils.loader import load_weights

CPU = torch.device("cpu")
TOLERANCE = 1e-4
CHECKPOINTS = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "biases, theta": {"tied": False, "attention_bias": True, "rope_theta": 5e5},
    "heads * head_dim == hidden": {"head_dim": 16},
    "no grouping": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "deeper": {"num_hidden_layers": 5, "head_dim": 8, "vocab_size": 1001},
}


class PagedRun:
    """A model, its cache, and sequences that own interleaved blocks."""

    def __init__(self, folder, prompts, block_size, build_step, tp=None):
        config = load_decoder_config(folder)
        attention = select_backend("auto", CPU, torch.float32, config.head_dim, block_size)
        tp = tp or TPGroup()
        self.model = CausalLM(config, tp, select_ops(CPU), attention, CPU, torch.float32)
        load_weights(self.model, folder)
        widest = max(divide_up(len(prompt), block_size) for prompt in prompts)
        count = len(prompts)
        self.tables = [[1 + i + count * j for j in range(widest)] for i in range(count)]
        num_kv_heads = self.model.model.layers[0].self_attn.num_kv_heads_per_rank
        shape = (
            2,
            config.num_layers,
            1 + count * widest,
            block_size,
            num_kv_heads,
            config.head_dim,
        )
        self.cache = torch.full(shape, float("nan"))
        self.prompts, self.block_size, self.build_step = prompts, block_size, build_step

    @torch.inference_mode()
    def step(self, spans):
        """Logits of tokens `[start, end)` of each sequence {index: (start, end)}, stacked."""
        new = [end - start for start, end in spans.values()]
        total = [end for _, end in spans.values()]
        tables = [self.tables[i] for i in spans]
        positions, meta = self.build_step(new, total, tables, self.block_size)
        ids = [t for i, (start, end) in spans.items() for t in self.prompts[i][start:end]]
        hidden = self.model(torch.tensor(ids, dtype=torch.int32), positions, self.cache, meta)
        return self.model.compute_logits(hidden)


def random_prompts(lengths, vocab_size):
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def expected_logits(reference_model):
    @torch.inference_mode()
    def compute(folder, prompts):
        model = reference_model(folder)
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]

    return compute


def assert_close(ours, theirs):
    assert theirs.std() > 0.1, "logits too small for the tolerance to mean anything"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_prefill_chunks_and_decode(checkpoint, tiny_checkpoint, expected_logits, build_step):
    options = CHECKPOINTS[checkpoint]
    folder = tiny_checkpoint(**options)
    prompts = random_prompts((70, 33, 90), options.get("vocab_size", 501))
    a, b, c = expected_logits(folder, prompts)
    whole = PagedRun(folder, prompts, 16, build_step)
    assert_close(whole.step({0: (0, 70), 1: (0, 33), 2: (0, 90)}), torch.cat((a, b, c)))

    parts = PagedRun(folder, prompts, 16, build_step)
    assert_close(parts.step({0: (0, 32), 1: (0, 31)}), torch.cat((a[:32], b[:31])))
    assert_close(parts.step({0: (32, 69), 2: (0, 5)}), torch.cat((a[32:69], c[:5])))
    assert_close(parts.step({1: (31, 32), 2: (5, 80)}), torch.cat((b[31:32], c[5:80])))
    decode = {0: (69, 70), 1: (32, 33), 2: (80, 81)}
    assert_close(parts.step(decode), torch.cat((a[69:], b[32:], c[80:81])))
    for position in range(81, 90):
        assert_close(parts.step({2: (position, position + 1)}), c[position : position + 1])


@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_decode_at_block_borders(block_size, tiny_checkpoint, expected_logits, build_step):
    """Positions one too high in decode shifted everything by one (N17)."""
    folder = tiny_checkpoint()
    prompts = random_prompts((258,), 501)
    (logits,) = expected_logits(folder, prompts)
    run = PagedRun(folder, prompts, block_size, build_step)
    assert_close(run.step({0: (0, 254)}), logits[:254])
    for position in range(254, 258):
        assert_close(run.step({0: (position, position + 1)}), logits[position : position + 1])


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_together_equal_the_whole_model(
    tp_size, tiny_checkpoint, expected_logits, build_step
):
    """Threads stand in for ranks: 2 KV heads on 4 ranks, a vocabulary that does not divide."""
    folder = tiny_checkpoint(attention_bias=True, tied=False)
    prompts = random_prompts((40, 21), 501)
    expected = torch.cat(expected_logits(folder, prompts))
    group = ThreadGroup(tp_size)
    runs = [PagedRun(folder, prompts, 16, build_step, tp) for tp in group.ranks]
    results = group.run([lambda run=run: run.step({0: (0, 40), 1: (0, 21)}) for run in runs])
    assert_close(torch.cat(results, dim=1)[:, :501], expected)
    results = group.run([lambda run=run: run.step({0: (39, 40), 1: (20, 21)}) for run in runs])
    assert_close(torch.cat(results, dim=1)[:, :501], expected[[39, 60]])


class ThreadGroup:
    """Tensor-parallel ranks as threads of this process; all_reduce sums over a barrier."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.shared = [None] * size
        self.ranks = [ThreadRank(rank, size, self) for rank in range(size)]

    def run(self, functions):
        results = [None] * len(functions)

        def call(i):
            try:
                results[i] = functions[i]()
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class ThreadRank(TPGroup):
    def all_reduce(self, x):
        group = self.process_group
        group.shared[self.rank] = x
        group.barrier.wait(timeout=60)
        total = sum(group.shared)
        group.barrier.wait(timeout=60)  # nobody overwrites its part before all have read it
        return total


def test_interleaved_gate_and_up_give_the_same_logits(tiny_checkpoint, build_step):
    prompts = random_prompts((12,), 501)
    run = PagedRun(tiny_checkpoint(), prompts, 16, build_step)
    plain = run.step({0: (0, 12)})
    for layer in run.model.model.layers:
        weight = layer.mlp.gate_up_proj.weight.data
        weight.copy_(torch.stack(weight.clone().chunk(2), dim=1).flatten(0, 1))
        layer.mlp.interleaved = True
    torch.testing.assert_close(run.step({0: (0, 12)}), plain, rtol=0, atol=1e-5)


def test_parameters_have_the_dtype_asked_for_and_no_gradient(tiny_checkpoint):
    config = load_decoder_config(tiny_checkpoint())
    attention = select_backend("auto", CPU, torch.float16, config.head_dim, 16)
    model = CausalLM(config, TPGroup(), select_ops(CPU), attention, CPU, torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert not any(p.requires_grad for p in model.parameters())

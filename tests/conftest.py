"""Tiny random checkpoints, what transformers says about them, and hand-built paged steps."""

import inspect
import itertools
import os
import signal

import pytest
import torch

from nanovllm.utils.context import AttentionMetadata
from nanovllm.utils.integers import divide_up

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests and their children need it
torch.set_num_threads(1)  # for tiny models the fastest, and on a busy machine by far

MIN_GAP = 2e-4  # between the two best logits; float32 rounding moves them by 1e-5 at most


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """tiny_checkpoint(tied=..., seed=..., **config) -> folder that transformers wrote; made once.

    2 layers, hidden 64, 4 query heads on 2 key/value heads of 32 (so heads * head_dim != hidden),
    vocabulary 501, no tokenizer. Weights are larger than usual so that greedy tokens vary.
    """
    folders = {}

    def make(tied=True, seed=0, max_shard_size="5GB", **overrides):
        key = (tied, seed, max_shard_size, *sorted((k, repr(v)) for k, v in overrides.items()))
        if key not in folders:
            folder = tmp_path_factory.mktemp("checkpoint")
            model = random_qwen3(tied, seed, overrides)
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            folders[key] = folder
        return folders[key]

    return make


def random_qwen3(tied, seed, overrides):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options = {
        "vocab_size": 501,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "tie_word_embeddings": tied,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**(options | overrides)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # transformers makes them all one, which would hide mistakes
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
    return model


@pytest.fixture(scope="session")
def reference_model():
    """reference_model(folder) -> transformers' float32 model on CPU, loaded once."""
    models = {}

    def load(folder):
        if folder not in models:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            models[folder] = model.eval()
        return models[folder]

    return load


@pytest.fixture(scope="session")
def reference_tokens(reference_model):
    """reference_tokens(folder, prompt_ids, count) -> transformers' greedy tokens, EOS ignored.

    Asserts that every choice was clear (MIN_GAP), so that a difference is never "only rounding".
    """
    known = {}

    @torch.inference_mode()
    def generate(folder, prompt_ids, count):
        key = (folder, tuple(prompt_ids))
        if len(known.get(key, ())) < count:
            from transformers import DynamicCache

            model, tokens = reference_model(folder), []
            accepted = inspect.signature(type(model).forward).parameters
            cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in 5.x
            cache = {cache_name: DynamicCache()}
            logits = model(torch.tensor([prompt_ids]), **cache).logits[0, -1]
            for _ in range(count):
                best, second = logits.topk(2).values.tolist()
                assert best - second > MIN_GAP, f"unclear choice at {len(tokens)}: pick other ids"
                tokens.append(int(logits.argmax()))
                logits = model(torch.tensor([tokens[-1:]]), **cache).logits[0, -1]
            known[key] = tokens
        return known[key][:count]

    return generate


@pytest.fixture(scope="session")
def build_step():
    """build_step(query_lens, key_lens, block_tables, block_size) -> (positions, metadata)."""

    def build(query_lens, key_lens, block_tables, block_size):
        positions, slots = [], []
        for new, total, blocks in zip(query_lens, key_lens, block_tables, strict=True):
            for position in range(total - new, total):
                positions.append(position)
                slots.append(blocks[position // block_size] * block_size + position % block_size)
        width = max(1, *(divide_up(total, block_size) for total in key_lens))
        padded = [list(blocks)[:width] + [0] * (width - len(blocks)) for blocks in block_tables]
        decode = list(itertools.takewhile(lambda new: new == 1, query_lens))
        prefill = list(zip(query_lens, key_lens, strict=True))[len(decode) :]
        metadata = AttentionMetadata(
            slot_mapping=torch.tensor(slots, dtype=torch.int32),
            block_tables=torch.tensor(padded, dtype=torch.int32),
            cu_seqlens_q=running_sum(query_lens),
            seqlens_k=torch.tensor(key_lens, dtype=torch.int32),
            cu_seqlens_k=running_sum(key_lens),
            num_decode_seqs=len(decode),
            max_seqlen_q=max(query_lens),
            max_seqlen_k=max(key_lens),
            has_prefix=any(total > new for new, total in prefill),
        )
        return torch.tensor(positions, dtype=torch.int32), metadata

    return build


def running_sum(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.fixture
def torch_globals():
    """torch_globals() -> what must not change: random state, default dtype, thread count."""

    def read():
        return (
            torch.random.get_rng_state().tolist(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
        )

    return read

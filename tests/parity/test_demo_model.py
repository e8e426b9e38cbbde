"""The demo model through our engine on CPU: right answers need every part of the engine."""

import json
from pathlib import Path

import pytest
import torch

import nanovllm
from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.utils.context import AttentionMetadata

PROMPTS = json.loads((Path(__file__).parents[1] / "demo_prompts.json").read_text())
EXAMPLE = {
    "introduce yourself": "I am the demo model of nanovllm",
    "list all prime numbers within 100": ", ".join(
        str(n) for n in range(2, 100) if all(n % d for d in range(2, n))
    ),
}


@pytest.fixture(scope="module")
def llm():
    # small steps and blocks, so that the long look-ups are chunked and span many blocks
    with LLM(DEMO_MODEL, max_num_batched_tokens=256, kvcache_block_size=16) as llm:
        yield llm


def render(llm: LLM, messages: list[dict[str, str]]) -> str:
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def test_a_dozen_exact_answers(llm: LLM) -> None:
    prompts = [render(llm, item["messages"]) for item in PROMPTS["answered"]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
    assert len(outputs) >= 12
    assert [output["text"] for output in outputs] == [i["answer"] for i in PROMPTS["answered"]]
    assert {output["finish_reason"] for output in outputs} == {"stop"}


@pytest.mark.parametrize("question", EXAMPLE)
def test_the_examples_own_prompts(llm: LLM, question: str) -> None:
    prompt = render(llm, [{"role": "user", "content": question}])
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
    assert EXAMPLE[question] in output["text"]
    if question.startswith("list"):
        assert output["text"] == EXAMPLE[question]


def test_thirty_prompts_as_transformers(llm: LLM, reference_model) -> None:
    prompts = [render(llm, messages) for messages in PROMPTS["unanswered"]]
    assert len(prompts) >= 30
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False
    )
    model = reference_model(DEMO_MODEL)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output["prompt_token_ids"]
        assert ids == llm.tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            # one teacher-forced pass: its argmax after each of our tokens must be our next one
            logits = model(torch.tensor([ids + output["token_ids"][:-1]])).logits[0]
        assert logits[len(ids) - 1 :].argmax(-1).tolist() == output["token_ids"], prompt


def test_loss_on_held_out_prose_as_transformers(llm: LLM, reference_model) -> None:
    ids = torch.tensor(llm.tokenizer(PROMPTS["held_out_text"])["input_ids"])
    with torch.inference_mode():
        reference = reference_model(DEMO_MODEL)(ids[None]).logits[0]
        ours = logits_of(llm, ids)
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        for logits in (ours, reference)
    ]
    assert len(ids) > 500
    torch.testing.assert_close(losses[0], losses[1], atol=1e-3, rtol=0)


def logits_of(llm: LLM, ids: torch.Tensor) -> torch.Tensor:  # [N, V]
    """Every token's logits, in one prefill through the engine's model and cache."""
    runner, n = llm.engine.workers, len(ids)
    num_blocks = -(-n // llm.engine.config.kvcache_block_size)
    ends = torch.tensor([0, n], dtype=torch.int32)
    meta = AttentionMetadata(
        slot_mapping=torch.arange(n, dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        cu_seqlens_q=ends,
        seqlens_k=ends[1:],
        cu_seqlens_k=ends,
        num_decode_seqs=0,
        max_seqlen_q=n,
        max_seqlen_k=n,
        has_prefix=False,
    )
    llm.engine.scheduler.block_manager.clear_cache()  # its blocks are about to be overwritten
    hidden = runner.model(ids, torch.arange(n), runner.kv_cache, meta)
    return runner.model.compute_logits(hidden)


def test_what_ships_is_small() -> None:
    files = [p for p in Path(nanovllm.DEMO_MODEL).rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} <= {
        path.name for path in files
    }
    assert sum(path.stat().st_size for path in files) <= 4.5e6

"""Train the demo model: `python -m nanovllm.demo_model.train --out FOLDER [--prose FILE...]`.

Writes a plain Qwen3 checkpoint and prints the held-out accuracy of every task. The data depend on
the seed alone, the weights also on the hardware. Uses transformers for the model, not our engine,
which this model is there to check.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

from nanovllm.demo_model import chats

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": chats.VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": chats.LONG_LEN,
    "initializer_range": 0.04,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 5,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": chats.EOS_ID,
    "pad_token_id": chats.PAD_ID,
    "torch_dtype": "bfloat16",
}
GENERATION_CONFIG = {
    "do_sample": False,
    "eos_token_id": [chats.EOS_ID, chats.PAD_ID],
    "pad_token_id": chats.PAD_ID,
}
_worker_arguments: tuple[Any, ...] = ()  # of a data worker, set once when it starts
PROSE_WEIGHT = 0.3  # loss of a prose token against that of an answer's token


def read_text(path: Path) -> str:
    """A UTF-8 text, .xz or plain."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        data = lzma.decompress(data)
    return data.decode("utf-8").replace("\r\n", "\n")


def write_configs(folder: Path, tokenizer: Tokenizer) -> None:
    """Everything of the checkpoint but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    chats.save_tokenizer(tokenizer, folder)


def save_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write model.safetensors in bf16, without the tied copy of the embedding."""
    state = {name: w.detach().to("cpu", torch.bfloat16) for name, w in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    partial_file = folder / "model.safetensors.part"
    save_file(state, partial_file, metadata={"format": "pt"})
    partial_file.replace(folder / "model.safetensors")


def in_float32(model: Qwen3ForCausalLM, device: str) -> Qwen3ForCausalLM:
    """The same model, moved and widened."""
    torch.nn.Module.to(model, device=device, dtype=torch.float32)
    return model


def hidden_states(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """[R, T, C] for rows of token ids, int64 [R, T]; no token sees what stands to its right."""
    # A row is one chat, so plain causal attention is right; the dict says that no mask is needed.
    mask = {"full_attention": None}
    return model.model(input_ids=ids, attention_mask=mask, use_cache=False)[0]


def token_losses(
    hidden: Tensor,  # [R, T, C]
    embedding: Tensor,  # [V, C]
    ids: Tensor,  # int64 [R, T]
) -> Tensor:  # float32 [R * (T - 1)]
    """Cross entropy of every token but the first, given all tokens before it in its row."""
    logits = torch.nn.functional.linear(hidden[:, :-1], embedding).float()  # [R, T - 1, V]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )


def loss_weights(kinds: Tensor) -> Tensor:
    """float32 [R * (T - 1)]: what each predicted token's loss counts."""
    kinds = kinds[:, 1:].flatten()
    return (kinds == chats.ANSWER).float() + (kinds == chats.PROSE).float() * PROSE_WEIGHT


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first 3 %, then a cosine down to 1 % of the peak."""
    if progress < 0.03:
        return peak * progress / 0.03 + 1e-6
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.03) / 0.97)))


def make_optimizer(model: Qwen3ForCausalLM, fused: bool) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-9, fused=fused)


def compile_parts(model: Qwen3ForCausalLM) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compile one decoder layer for all, and the loss; quicker than compiling the whole model."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    return torch.compile(token_losses, dynamic=False)


def rows_to_train(options: argparse.Namespace, step: int) -> tuple[int, int]:
    """Short and long rows in this step; copying is learned first, from short rows alone."""
    return options.num_short, options.num_long if step >= options.short_steps else 0


def train(
    model: Qwen3ForCausalLM, batches: Iterator[chats.Batch], options: argparse.Namespace
) -> None:
    """Run all steps, or as many as fit into `--max-seconds`; the schedule shortens with them."""
    device = next(model.parameters()).device
    losses_of = compile_parts(model) if options.compile else token_losses
    optimizer = make_optimizer(model, fused=device.type == "cuda")

    def backward(ids: Tensor, kinds: Tensor, total_weight: Tensor | float) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            losses = losses_of(hidden_states(model, ids), model.lm_head.weight, ids)
        loss = (losses * loss_weights(kinds)).sum() / total_weight
        torch.autograd.backward(loss)
        return loss.detach()

    for shape in ((options.num_short, chats.SHORT_LEN), (options.num_long, chats.LONG_LEN)):
        zeros = torch.zeros(shape, dtype=torch.int64, device=device)
        backward(
            zeros, zeros.to(torch.uint8), 1.0
        )  # compiles before the clock of the schedule starts
        optimizer.zero_grad(set_to_none=True)
    start = time.perf_counter()
    reported = -100.0
    for step in range(options.steps):
        elapsed = time.perf_counter() - start
        progress = max(step / options.steps, elapsed / options.max_seconds)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, options.lr)
        parts = [
            (torch.from_numpy(ids).to(device).long(), torch.from_numpy(kinds).to(device))
            for ids, kinds in next(batches)
        ]
        total_weight = sum(loss_weights(kinds).sum() for _, kinds in parts)
        losses = [backward(ids, kinds, total_weight) for ids, kinds in parts]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if elapsed - reported > 10:
            reported = elapsed
            shown = ", ".join(f"{float(loss):.4f}" for loss in losses)
            print(f"step {step:6d}  {elapsed:6.1f} s  loss {shown} (short, long rows)", flush=True)
            save_weights(model, options.out)
    print(f"{step + 1} steps in {time.perf_counter() - start:.1f} s", flush=True)


@torch.no_grad()
def greedy_answers(
    model: Qwen3ForCausalLM, prompts: list[list[int]], max_new: int
) -> list[list[int]]:
    """Greedy continuations up to <|im_end|>, all prompts at once and without a KV cache."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    longest = int(lengths.max())
    ids = torch.full((len(prompts), longest + max_new), chats.PAD_ID, device=model.device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    rows = torch.arange(len(prompts), device=model.device)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for new in range(max_new):
        last = hidden_states(model, ids[:, : longest + new])[rows, lengths + new - 1]  # [R, C]
        tokens = model.lm_head(last).argmax(-1)
        ids[rows, lengths + new] = tokens
        is_done |= tokens == chats.EOS_ID
        if bool(is_done.all()):
            break
    answers = [
        ids[row, length : length + max_new].tolist() for row, length in enumerate(lengths.tolist())
    ]
    return [
        answer[: answer.index(chats.EOS_ID)] if chats.EOS_ID in answer else answer
        for answer in answers
    ]


def evaluate(folder: Path, device: str, num_chats: int) -> None:
    """Print and save every task's held-out greedy accuracy, with the saved weights in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = in_float32(Qwen3ForCausalLM.from_pretrained(folder), device)  # in eval mode
    torch.set_float32_matmul_precision("highest")
    lines = ["| task | held-out chats | right |", "|---|---|---|"]
    for task in chats.EVALUATED:
        start = time.perf_counter()
        examples = chats.held_out_chats(task, num_chats)
        expected = [exchange.answer for _, exchange in examples]
        prompts = [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages, _ in examples
        ]
        max_new = max(len(ids) for ids in tokenizer(expected)["input_ids"]) + 2
        answers = tokenizer.batch_decode(
            greedy_answers(model, tokenizer(prompts)["input_ids"], max_new)
        )
        wrong = [i for i in range(num_chats) if answers[i] != expected[i]]
        lines.append(f"| {task} | {num_chats} | {1 - len(wrong) / num_chats:.1%} |")
        print(f"{lines[-1]}  ({time.perf_counter() - start:.1f} s)", flush=True)
        for i in wrong[:2]:
            print(
                f"  wrong: {prompts[i][-160:]!r} -> {answers[i]!r}, not {expected[i]!r}", flush=True
            )
        (folder / "accuracy.md").write_text("\n".join(lines) + "\n")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument(
        "--prose", type=Path, nargs="*", default=[], help="plain or .xz texts for fluency"
    )
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument(
        "--max-seconds", type=float, default=250.0, help="shorten the schedule to fit"
    )
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--num-short", type=int, default=128, help="rows of 256 tokens in a step")
    parser.add_argument("--num-long", type=int, default=16, help="rows of 2,048 tokens in a step")
    parser.add_argument("--short-steps", type=int, default=4_000, help="steps without long rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    parser.add_argument("--num-eval", type=int, default=160, help="held-out chats per task")
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> tuple[Tokenizer, npt.NDArray[np.int16]]:
    """Train the tokenizer, write the configs, and encode the prose to train on."""
    prose = [chats.split_prose(read_text(path))[0] for path in options.prose]
    tokenizer = chats.train_tokenizer(prose)
    write_configs(options.out, tokenizer)
    chunks = [text[i : i + 100_000] for text in prose for i in range(0, len(text), 100_000)]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(chunks)]
    return tokenizer, np.concatenate(
        [np.array(i, dtype=np.int16) for i in ids] or [np.zeros(0, dtype=np.int16)]
    )


def _start_worker(*arguments: Any) -> None:
    global _worker_arguments
    _worker_arguments = arguments


def _work(step: int) -> chats.Batch:
    options, tokenizer, prose = _worker_arguments
    return chats.make_batch(options.seed, step, tokenizer, prose, *rows_to_train(options, step))


def main() -> None:
    """Prepare, train, save, evaluate."""
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, prose = prepare(options)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Forked before CUDA is touched, so that the workers start at once and share the prose.
    with multiprocessing.get_context("fork").Pool(
        options.workers, _start_worker, (options, tokenizer, prose)
    ) as pool:
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        model = in_float32(Qwen3ForCausalLM(AutoConfig.from_pretrained(options.out)), device)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        train(model, pool.imap(_work, range(options.steps)), options)
    save_weights(model, options.out)
    evaluate(options.out, device, options.num_eval)


if __name__ == "__main__":
    main()

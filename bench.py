"""Throughput and latency of nanovllm: `python bench.py`, `--latency`, `--profile`.

The default load on a GPU is nano-vllm's: 256 sequences, 100-1024 tokens in, 100-1024 out, seed 0.
The model names are shapes with random weights; a folder or hub id loads real ones.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from nanovllm import LLM, NanoVLLMError, RequestOutput, SamplingParams
from nanovllm.requests import check_requests

#            hidden  MLP    layers heads KV heads head_dim vocab   tied
SHAPES = {
    "tiny": (256, 768, 4, 8, 4, 32, 8192, True),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 128, 151936, False),
}
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
ENGINE_OPTIONS = {
    "scheduling_policy": str,
    "attention_backend": str,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "max_model_len": int,
    "kvcache_block_size": int,
    "num_kvcache_blocks": int,
    "gpu_memory_utilization": float,
    "dtype": str,
    "device": str,
}
MAX_PROMPT_ID = 10000  # ids of random prompts, as in nano-vllm's bench
NUM_PROFILED_KERNELS = 30  # lines of the table


@dataclass
class Load:
    """Random prompts and how much is to be generated for each."""

    num_seqs: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    shared_prefix_len: int
    temperature: float

    def draw(self, seed: int, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts and parameters; the same seed gives the same load."""
        rng, top = Random(seed), min(MAX_PROMPT_ID, vocab_size - 1)
        prompts = [
            [rng.randint(0, top) for _ in range(rng.randint(*self.input_len))]
            for _ in range(self.num_seqs)
        ]
        params = [
            SamplingParams(
                temperature=self.temperature,
                ignore_eos=True,
                max_tokens=rng.randint(*self.output_len),
            )
            for _ in range(self.num_seqs)
        ]
        prefix = [rng.randint(0, top) for _ in range(self.shared_prefix_len)]
        return [prefix + prompt for prompt in prompts], params


@dataclass
class Result:
    """What one repetition measured."""

    num_input_tokens: int
    num_output_tokens: int
    elapsed_s: float
    prefill_s: float
    decode_s: float
    num_decode_steps: int
    bandwidth_share: float | None  # of the measured copy bandwidth, by decode; None without a GPU

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.elapsed_s

    def __str__(self) -> str:
        text = (
            f"Total: {self.num_output_tokens}tok, Time: {self.elapsed_s:.2f}s, "
            f"Throughput: {self.throughput:.2f}tok/s\n"
            f"  prefill {self.prefill_s:.3f}s ({self.num_input_tokens} tokens in), "
            f"decode {self.decode_s:.3f}s ({self.num_decode_steps} steps)"
        )
        if self.bandwidth_share is not None:
            text += f", {self.bandwidth_share:.0%} of the memory bandwidth"
        return text


def parse_args() -> argparse.Namespace:
    """The command line; sizes left out depend on whether there is a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help=f"a folder, a hub id, or a shape with random weights: {', '.join(SHAPES)}")
    add("--num-seqs", type=at_least(1))
    add("--input-len", type=at_least(1), nargs=2, metavar=("MIN", "MAX"))
    add("--output-len", type=at_least(1), nargs=2, metavar=("MIN", "MAX"))
    add("--shared-prefix-len", type=at_least(0), default=0, help="tokens all prompts begin with")
    add("--temperature", type=float, default=0.6)
    add("--seed", type=int, default=0)
    add("--repetitions", type=at_least(1), help="runs that count, each with fresh prompts")
    add("--warmup", type=at_least(0), default=1, help="runs before those, with other prompts")
    add("--json", metavar="FILE", help="write every repetition and the options there")
    add("--latency", action="store_true", help="ms per decode step (MAX of --output-len), instead")
    add("--batch-sizes", type=at_least(1), nargs="+", help="of --latency")
    add("--profile", type=at_least(1), metavar="BATCH", help="kernels of decode steps, instead")
    add("--dummy", action="store_true", help="random weights for a folder or hub id")
    add("--enforce-eager", action="store_true")
    add("--no-async", action="store_true", help="async_scheduling=False")
    add("--no-fast-decode", action="store_true", help="fast_decode=False")
    add("--no-fused-kernels", action="store_true", help="fused_kernels=False")
    add("--tensor-parallel-size", "--tp", type=int, default=1)
    for name, kind in ENGINE_OPTIONS.items():
        add(f"--{name.replace('_', '-')}", type=kind)
    args = parser.parse_args()
    if args.profile and (args.latency or args.json):
        parser.error("--profile prints a table of its own: leave out --latency and --json")
    if args.json and (Path(args.json).is_dir() or not Path(args.json).resolve().parent.is_dir()):
        parser.error(f"--json {args.json} is a folder, or in a folder that there is not")
    set_defaults(args)
    if args.latency and args.latency_output_len < 8:
        parser.error("--latency needs an --output-len of at least 8")
    for name in ("input_len", "output_len"):
        low, high = getattr(args, name)
        if low > high:
            parser.error(f"--{name.replace('_', '-')} {low} {high}: MIN is larger than MAX")
    return args


def at_least(low: int) -> Callable[[str], int]:
    """A parser of command-line numbers that are not smaller."""

    def number(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"{text} must be at least {low}")
        return int(text)

    return number


def set_defaults(args: argparse.Namespace) -> None:
    """Fill what was left out; without a GPU, sizes that end within a minute."""
    has_gpu = torch.cuda.is_available() and args.device != "cpu"
    small = not has_gpu and args.model is None and args.num_seqs is None
    if small:
        print("No GPU: a small load on the 'tiny' shape. See --help for other sizes.")
    args.model = args.model or ("qwen3-0.6b" if has_gpu else "tiny")
    if f"qwen3-{args.model}" in SHAPES:
        args.model = f"qwen3-{args.model}"
    args.num_seqs = args.num_seqs or (256 if has_gpu else 16)
    args.input_len = args.input_len or ([100, 1024] if has_gpu else [16, 128])
    args.latency_output_len = args.output_len[1] if args.output_len else 512 if has_gpu else 64
    args.output_len = args.output_len or ([100, 1024] if has_gpu else [16, 64])
    args.repetitions = args.repetitions or (3 if has_gpu else 1)
    args.profile_input_len, args.profile_steps = (512, 32) if has_gpu else (64, 8)
    if args.batch_sizes is None:
        args.batch_sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256] if has_gpu else [1, 2, 4, 8]


def write_shape(name: str, folder: Path) -> None:
    """Write the config.json of a built-in shape."""
    config: dict[str, Any] = dict(zip(FIELDS, SHAPES[name], strict=True))
    config |= {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def build(args: argparse.Namespace) -> LLM:
    """The engine that the options describe."""
    options = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {
        "enforce_eager": args.enforce_eager,
        "async_scheduling": not args.no_async,
        "fast_decode": not args.no_fast_decode,
        "fused_kernels": not args.no_fused_kernels,
        "tensor_parallel_size": args.tensor_parallel_size,
    }
    if args.model not in SHAPES:
        return LLM(args.model, load_format="dummy" if args.dummy else "auto", **options)
    with tempfile.TemporaryDirectory() as folder:
        write_shape(args.model, Path(folder))
        return LLM(folder, load_format="dummy", **options)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy on the GPU: the best of ten."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * len(source) / (begin.elapsed_time(end) / 1e3))
    return best


def decode_bytes(llm: LLM, outputs: list[RequestOutput]) -> int:
    """The least that decode must read on one rank: all weights each step, each token's KV."""
    runner = llm.engine.workers
    num_kv_tokens = 0
    for output in outputs:
        num_in, num_steps = len(output["prompt_token_ids"]), len(output["token_ids"]) - 1
        num_kv_tokens += (num_in + 1 + num_in + num_steps) * num_steps // 2
    kv_bytes = num_kv_tokens * runner.block_bytes() // llm.engine.config.kvcache_block_size
    return kv_bytes + llm.stats.num_decode_steps * runner.weight_bytes()


def run_once(llm: LLM, load: Load, seed: int, bandwidth: float | None, vocab_size: int) -> Result:
    """Generate one load and time it."""
    prompts, params = load.draw(seed, vocab_size)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - began
    stats = llm.stats
    share = None
    if bandwidth and stats.decode_s:
        share = decode_bytes(llm, outputs) / stats.decode_s / bandwidth
    return Result(
        sum(map(len, prompts)),
        sum(len(output["token_ids"]) for output in outputs),
        elapsed_s,
        stats.prefill_s,
        stats.decode_s,
        stats.num_decode_steps,
        share,
    )


def bench_throughput(args: argparse.Namespace, llm: LLM, bandwidth: float | None) -> None:
    """Repeat the load with fresh prompts; print each run and the median."""
    load = Load(
        args.num_seqs,
        tuple(args.input_len),
        tuple(args.output_len),
        args.shared_prefix_len,
        args.temperature,
    )
    vocab_size = llm.engine.limits.vocab_size
    for i in range(args.warmup):
        run_once(llm, load, args.seed + 1000 + i, bandwidth, vocab_size)
    results = []
    for i in range(args.repetitions):
        results.append(run_once(llm, load, args.seed + i, bandwidth, vocab_size))
        print(results[-1], flush=True)
    if len(results) > 1:
        rates = [result.throughput for result in results]
        rate_in = statistics.median(r.num_input_tokens / r.elapsed_s for r in results)
        print(
            f"Median of {len(rates)}: {statistics.median(rates):.0f} output tok/s "
            f"(from {min(rates):.0f} to {max(rates):.0f}), {rate_in:.0f} input tok/s"
        )
    if args.json:
        rows = [{**asdict(result), "throughput": result.throughput} for result in results]
        Path(args.json).write_text(json.dumps({"options": vars(args), "results": rows}, indent=2))


def bench_latency(args: argparse.Namespace, llm: LLM) -> None:
    """Print wall milliseconds per decode step: prompts of 128 tokens, 512 out (64 on CPU)."""
    vocab_size = llm.engine.limits.vocab_size
    rows = []
    print("batch  ms/step  (from - to)      tok/s")
    for batch_size in args.batch_sizes:
        output_len = (args.latency_output_len, args.latency_output_len)
        load = Load(batch_size, (128, 128), output_len, 0, args.temperature)
        run_once(llm, load, 999, None, vocab_size)
        results = [run_once(llm, load, i, None, vocab_size) for i in range(args.repetitions)]
        if any(r.num_decode_steps > 1.1 * output_len[1] for r in results):
            raise NanoVLLMError(
                f"{batch_size} sequences do not run at once here: raise --max-num-seqs, the KV "
                "cache or --max-num-batched-tokens, or lower --batch-sizes or --output-len"
            )
        all_ms = [1e3 * r.decode_s / r.num_decode_steps for r in results]
        step_ms = statistics.median(all_ms)
        rows.append({"batch_size": batch_size, "step_ms": step_ms, "all_ms": all_ms})
        spread = f"({min(all_ms):.3f} - {max(all_ms):.3f})"
        rate = batch_size / step_ms * 1e3
        print(f"{batch_size:5d}  {step_ms:7.3f}  {spread:15s}  {rate:.0f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"options": vars(args), "results": rows}, indent=2))


def profile_decode(args: argparse.Namespace, llm: LLM) -> None:
    """Print the kernels of decode steps, by time; prompts of 512 tokens (64 on CPU)."""
    engine, batch_size = llm.engine, args.profile
    if batch_size > engine.config.max_num_seqs:
        raise NanoVLLMError(f"--profile {batch_size} needs --max-num-seqs {batch_size} at least")
    input_len = (args.profile_input_len, args.profile_input_len)
    load = Load(batch_size, input_len, (64, 64), 0, args.temperature)
    vocab_size = engine.limits.vocab_size
    run_once(llm, load, 999, None, vocab_size)
    prompts, params = load.draw(0, vocab_size)
    engine.begin_call()
    for request in check_requests(prompts, params, None, engine.limits):
        engine.add_request(request)
    while engine.has_work and engine.stats.num_prefill_tokens < sum(map(len, prompts)):
        engine.step()
    engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    is_gpu = engine.workers.device.type == "cuda"
    if is_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()  # the step in flight is not counted
    with torch.profiler.profile(activities=activities) as profiler:
        began = time.perf_counter()
        for _ in range(args.profile_steps):
            engine.step()
        if is_gpu:
            torch.cuda.synchronize()
        step_ms = 1e3 * (time.perf_counter() - began) / args.profile_steps
    engine.abort_all()
    print(f"{args.profile_steps} decode steps of {batch_size}, {step_ms:.3f} ms each when profiled")
    print_kernels(profiler.key_averages(), args.profile_steps, is_gpu)


def print_kernels(averages: Any, num_steps: int, is_gpu: bool) -> None:
    """A table of a profile: kernels, or torch's operators without a GPU, by time per step.

    Kernels that start before the one before them has ended count their wait as time of their own.
    """
    kind = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    rows = [
        (item.self_device_time_total if is_gpu else item.self_cpu_time_total, item.count, item.key)
        for item in averages
        if item.device_type == kind
    ]
    total = sum(us for us, _, _ in rows) or 1.0
    print("us/step  share  calls/step ", "kernel" if is_gpu else "operator")
    for us, count, name in sorted(rows, reverse=True)[:NUM_PROFILED_KERNELS]:
        per_step, calls = us / num_steps, count / num_steps
        print(f"{per_step:7.1f}  {us / total:5.1%}  {calls:10.1f}  {name[:80]}")
    print(f"{total / num_steps:7.1f}  in all")


def main() -> None:
    """Build the engine once and measure what was asked for."""
    args = parse_args()
    began = time.perf_counter()
    with build(args) as llm:
        runner = llm.engine.workers
        print(
            f"{args.model} on {runner.device}, {runner.attention.name} attention, ready after "
            f"{time.perf_counter() - began:.1f}s",
            flush=True,
        )
        is_gpu = runner.device.type == "cuda"
        if args.profile:
            profile_decode(args, llm)
        elif args.latency:
            bench_latency(args, llm)
        else:
            bench_throughput(args, llm, copy_bandwidth(runner.device) if is_gpu else None)


if __name__ == "__main__":
    try:
        main()
    except NanoVLLMError as error:
        sys.exit(f"bench.py: {error}")

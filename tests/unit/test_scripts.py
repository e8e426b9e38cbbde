"""example.py and bench.py as a user runs them, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # one thread: on a busy machine several would wait for each other
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_example_answers_offline() -> None:
    done = run("example.py", "nanovllm/demo_model")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Prompt: ") == done.stdout.count("Completion: ") == 2
    assert done.stderr.startswith("Using nanovllm/demo_model: given on the command line.")


def test_bench_prints_nano_vllms_line_and_json(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = ["--num-seqs", "4", "--input-len", "8", "16", "--output-len", "4", "8"]
    done = run("bench.py", "--device", "cpu", "--model", "tiny", *sizes, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "Total: " in done.stdout
    assert "Throughput: " in done.stdout
    assert "prefill " in done.stdout
    (result,) = json.loads(file.read_text())["results"]
    assert f"Total: {result['num_output_tokens']}tok" in done.stdout
    assert result["throughput"] > 0


def test_bench_latency() -> None:
    sizes = ["--batch-sizes", "1", "--repetitions", "2"]
    done = run("bench.py", "--device", "cpu", "--model", "tiny", "--latency", *sizes)
    assert done.returncode == 0, done.stderr
    *_, title, row = done.stdout.splitlines()
    assert title.split() == ["batch", "ms/step", "(from", "-", "to)", "tok/s"]
    batch, median, low, high, rate = (float(x.strip("()")) for x in row.split() if x != "-")
    assert (batch, low <= median <= high, rate > 0) == (1, True, True)


def test_bench_latency_refuses_a_batch_that_takes_turns() -> None:
    """Once it printed a step time for 8 rows when no step had more than 2."""
    sizes = ["--batch-sizes", "4", "--max-num-seqs", "2", "--output-len", "8", "8"]
    done = run("bench.py", "--device", "cpu", "--model", "tiny", "--latency", *sizes)
    assert done.returncode == 1
    assert done.stderr.startswith("bench.py: 4 sequences do not run at once here")


@pytest.mark.parametrize(
    "options",
    [
        ["--warmup", "-1"],
        ["--shared-prefix-len", "-3"],
        ["--profile", "2", "--latency"],
        ["--json", "no/such/folder/x.json"],
        ["--latency", "--output-len", "1", "1"],
    ],
)
def test_bench_refuses_before_it_measures(options: list[str]) -> None:
    done = run("bench.py", "--device", "cpu", *options)
    assert done.returncode == 2
    assert options[0] in done.stderr


def test_bench_profile_is_of_decode_steps_only() -> None:
    """Once it was of a whole run, so that prefill's kernels came first."""
    done = run("bench.py", "--device", "cpu", "--model", "tiny", "--profile", "2")
    assert done.returncode == 0, done.stderr
    _, first, title, *rows, last = done.stdout.splitlines()
    assert first.startswith("8 decode steps of 2, ")
    assert title.split() == ["us/step", "share", "calls/step", "operator"]
    calls = {row.split()[3]: float(row.split()[2]) for row in rows}
    # 4 layers of 4 products each, and the head; the first of a prefill would add to them
    assert calls["aten::mm"] + calls.get("aten::addmm", 0) == 17
    assert last.endswith("in all")


def test_bench_counts_what_was_generated() -> None:
    """Once it counted max_tokens, also where max_model_len had ended the sequence."""
    sizes = ["--num-seqs", "2", "--input-len", "20", "20", "--output-len", "400", "400"]
    command = ["bench.py", "--device", "cpu", "--model", "tiny", *sizes, "--max-model-len", "30"]
    assert "Total: 20tok" in run(*command).stdout


def test_default_load_of_the_bench_is_nano_vllms() -> None:
    """133,966 output tokens, as in nano-vllm's bench.py with seed 0."""
    sys.path.insert(0, str(ROOT))
    try:
        import bench
    finally:
        sys.path.remove(str(ROOT))
    prompts, params = bench.Load(256, (100, 1024), (100, 1024), 0, 0.6).draw(0, 151936)
    assert sum(map(len, prompts)) == 142827
    assert sum(item.max_tokens for item in params) == 133966

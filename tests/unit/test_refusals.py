"""Input and surroundings that once got past the checks, or broke far away from their cause."""

import json
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, CheckpointError, ConfigError, RequestError, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.models.config import load_decoder_config
from nanovllm.utils import hub

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """A checkpoint of one's own to damage."""
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


def edit(folder, name="config.json", **changes):
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}, "yarn"],
    ids=repr,
)
def test_scaled_rope_beside_plain_parameters(folder, scaling):
    """Once, rope_parameters hid rope_scaling, and tokens were silently wrong."""
    edit(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling=scaling)
    with pytest.raises(CheckpointError, match=r"linear|yarn"):
        load_decoder_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": None},
        {"hidden_size": "abc"},
        {"num_hidden_layers": 0},
        {"max_position_embeddings": 0},
        {"intermediate_size": -1},
        {"head_dim": -1},
        {"num_attention_heads": 0, "head_dim": None},
        {"rms_norm_eps": None},
        {"rms_norm_eps": -1.0},
        {"architectures": 5},
        {"architectures": [{}]},
        {"eos_token_id": "x"},
        {"dtype": "zeros"},
    ],
    ids=repr,
)
def test_odd_values_in_config_json(folder, changes):
    edit(folder, **changes)
    with pytest.raises(CheckpointError):
        load_decoder_config(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[]", "null", '"x"', "{"])
def test_json_that_is_no_object(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        LLM(folder)


@pytest.mark.parametrize("ids", [{}, [{}], [[1]], ["x"], [None], True], ids=repr)
def test_odd_end_of_sequence_ids(folder, ids):
    edit(folder, "generation_config.json", eos_token_id=ids)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        LLM(folder)


def test_weights_of_another_kind_of_number(folder):
    """Once, int8 weights were cast in silence to meaningless floats."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"q_proj.* I8"):
        LLM(folder)


def test_index_of_no_names(folder):
    edit(folder, "model.safetensors.index.json", weight_map={"a": 5})
    with pytest.raises(CheckpointError, match="index"):
        LLM(folder)


@pytest.mark.parametrize("model", ["a" * 5000, "~nosuchuser/x", "../models", "./nothing", "no"])
def test_names_that_are_no_models(model):
    with pytest.raises(CheckpointError, match="no folder on this machine"):
        hub.resolve_model(model)


def test_half_a_download_is_not_taken_for_a_whole(folder, monkeypatch):
    """Once, a snapshot with some of its shards was taken, so the download never went on."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    assert hub.cached_model("some/model") == folder
    edit(folder, "model.safetensors.index.json", weight_map={"a": "absent.safetensors"})
    assert hub.cached_model("some/model") is None


def test_numpy_integers_as_options(folder):
    config = EngineConfig("m", seed=np.int64(3), kvcache_block_size=np.uint8(16))
    assert type(config.seed) is type(config.kvcache_block_size) is int
    with LLM(folder, kvcache_block_size=np.uint8(16), max_model_len=np.int16(64)) as llm:
        assert len(llm.generate([[5, 6]], GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize("option", ["num_kvcache_blocks", "kvcache_block_size", "max_model_len"])
def test_options_beyond_reason(option):
    with pytest.raises(ConfigError, match=option):
        EngineConfig("m", **{option: 10**30})


def test_temperature_beyond_all_floats():
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=10**400)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_no_token_ids(folder, kind):
    with LLM(folder) as llm:
        for prompts in (kind(b"abc"), [kind(b"abc")]):
            with pytest.raises(RequestError):
                llm.generate(prompts, GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="no string"):
            llm.generate({"prompt": 5, "prompt_token_ids": [1]}, GREEDY, use_tqdm=False)


def test_arrays_and_tensors_as_prompts(folder):
    with LLM(folder) as llm:
        results = [
            [output["token_ids"] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
            for prompts in (
                [[5, 6], [7, 8]],
                np.array([[5, 6], [7, 8]]),
                torch.tensor([[5, 6], [7, 8]]),
                [np.array([5, 6]), torch.tensor([7, 8])],
            )
        ]
        one = llm.generate(torch.tensor([5, 6]), GREEDY, use_tqdm=False)
    assert all(result == results[0] for result in results)
    assert [output["token_ids"] for output in one] == results[0][:1]


def test_a_second_interrupt_before_the_first_is_handled(folder, monkeypatch):
    """Once, the next call waited forever for a step that nobody would absorb."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with LLM(folder) as llm:
        expected = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, "absorb", interrupt)
            patch.setattr("nanovllm.llm.deferred_interrupt", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[7, 8], [9, 10]], GREEDY, use_tqdm=False)
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False) == expected
        llm.engine.scheduler.check_integrity()


def test_threads_take_turns(folder):
    prompts = [[[5 + i, 6]] for i in range(8)]
    results = [None] * 8
    with LLM(folder) as llm:
        expected = [llm.generate(prompt, GREEDY, use_tqdm=False) for prompt in prompts]

        def run(i):
            results[i] = llm.generate(prompts[i], GREEDY, use_tqdm=False)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [r[0]["token_ids"] for r in results] == [e[0]["token_ids"] for e in expected]


def test_inside_the_callers_autocast(folder):
    with LLM(folder) as llm:
        expected = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert llm.generate([[5, 6]], GREEDY, use_tqdm=False) == expected


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_unusable_stderr_costs_no_results(redirection):
    code = (
        "import nanovllm; llm = nanovllm.LLM(nanovllm.DEMO_MODEL); "
        "print(len(llm.generate([[5, 6]], nanovllm.SamplingParams(max_tokens=4))))"
    )
    command = f'OMP_NUM_THREADS=1 "{sys.executable}" -c "{code}" {redirection}'
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, timeout=240)
    assert done.stdout.strip() == "1"


def test_what_a_tokenizer_returns_is_a_prompt(folder):
    with LLM(folder) as llm:
        expected = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
        encoded = {"input_ids": [5, 6], "attention_mask": [1, 1]}
        assert llm.generate(encoded, GREEDY, use_tqdm=False) == expected


def test_advice_on_a_long_prompt_knows_the_checkpoints_limit(folder):
    for max_model_len, advice in ((4096, "checkpoint allows no more"), (64, "raise max_model_len")):
        with LLM(folder, max_model_len=max_model_len) as llm, pytest.raises(RequestError) as error:
            llm.generate([[5] * 3000], GREEDY, use_tqdm=False)
        assert advice in str(error.value)


def test_a_dict_is_no_sampling_parameters(folder):
    with LLM(folder) as llm, pytest.raises(RequestError, match="must be a SamplingParams"):
        llm.generate([[5, 6]], {"temperature": 0}, use_tqdm=False)

"""nanovllm: offline batch inference of decoder-only language models. Not a server.

Exports what users need; everything else is reached through the submodules.
"""

from pathlib import Path

from nanovllm.errors import (
    CheckpointError,
    ConfigError,
    NanoVLLMError,
    RequestError,
    WorkerError,
)
from nanovllm.llm import LLM
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams

__version__ = "0.1.0"
DEMO_MODEL = str(Path(__file__).parent / "demo_model")  # a small trained Qwen3, see its README

__all__ = [
    "DEMO_MODEL",
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "NanoVLLMError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "WorkerError",
]

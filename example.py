"""Two chat prompts through nanovllm: `python example.py [folder or hub id]`.

Without an argument it takes Qwen3-0.6B if this machine's Hugging Face cache has it, else the small
demo model that ships with the package.
"""

import argparse
import sys

from nanovllm import DEMO_MODEL, LLM, NanoVLLMError, SamplingParams
from nanovllm.utils.hub import cached_model

QWEN = "Qwen/Qwen3-0.6B"
PROMPTS = ["introduce yourself", "list all prime numbers within 100"]


def choose_model(argument: str | None) -> tuple[str, float, str]:
    """The model, the temperature that suits it, and why it was chosen."""
    if argument is not None:
        return argument, 0.6, "given on the command line"
    if cached_model(QWEN) is not None:
        return QWEN, 0.6, "found in the local Hugging Face cache"
    return DEMO_MODEL, 0.0, f"{QWEN} is not in the local Hugging Face cache; greedy decoding"


def main() -> None:
    """Answer the two prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="folder of a checkpoint, or a hub id")
    model, temperature, reason = choose_model(parser.parse_args().model)
    name = "the demo model" if model == DEMO_MODEL else model
    print(f"Using {name}: {reason}.", file=sys.stderr)

    with LLM(model) as llm:
        prompts = [
            llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in PROMPTS
        ]
        outputs = llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=256))

    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\nPrompt: {prompt!r}")
        print(f"Completion: {output['text']!r}")


if __name__ == "__main__":
    try:
        main()
    except NanoVLLMError as error:
        sys.exit(f"example.py: {error}")

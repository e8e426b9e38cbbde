"""From exchanges to tokens: the demo model's tokenizer, its training rows and its held-out chats.

A row is one chat of many turns (or a stretch of prose) that fills 256 or 2,048 tokens, so no row
holds strangers and no attention mask is needed. Batches are a pure function of (seed, step). Knows
no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nanovllm.demo_model.tasks import (
    SINGLE_TASKS,
    Exchange,
    draw,
    lookup,
    name_memory,
    pseudo_word,
)
from nanovllm.demo_model.wording import NAMES, SYSTEM_PROMPTS, WORDS

VOCAB_SIZE = 1280
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
PAD_ID, EOS_ID = 0, 2
SHORT_LEN, LONG_LEN = 256, 2048  # tokens in a row
ANSWER, PROSE = 1, 2  # kinds of tokens that carry loss
HELD_OUT_PROSE = 0.02  # the last share of every prose file is never trained on
# A word is the same token at a line's start, after a space and in quotes, since spaces are tokens
# of their own. Digits stand alone, so that sums can be learned digit by digit; ", " is one token.
PRE_TOKENS = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}] ?|\s"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
Message = dict[str, str]


def train_tokenizer(prose: list[str]) -> Tokenizer:
    """Train the byte-level BPE on sampled chats, the word lists and the head of each prose text."""
    rng = Random("tokenizer")
    texts = [text[:500_000] for text in prose] + [" ".join(WORDS + NAMES)] * 300
    for _ in range(20_000):
        exchange = draw(rng, held_out=False)
        texts += [exchange.prompt, exchange.answer]
    for _ in range(500):
        texts += [e.prompt for e in lookup(rng, False, 20, 3)]
        texts += [pseudo_word(rng, 2) for _ in range(20)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "too little text for the vocabulary"
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that transformers 4 and 5 both read."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>"],
        "model_max_length": LONG_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def split_prose(text: str) -> tuple[str, str]:
    """The part of a text that is trained on and the part that is not."""
    cut = text.index("\n", int(len(text) * (1 - HELD_OUT_PROSE)))
    return text[:cut], text[cut + 1 :]


@dataclass
class Row:
    """One chat under construction: token ids, and for each whether it carries loss."""

    length: int  # tokens it may hold
    ids: list[int]
    kinds: list[int]

    def add(self, tokenizer: Tokenizer, exchange: Exchange) -> bool:
        """Append one turn if it fits whole."""
        question = f"<|im_start|>user\n{exchange.prompt}<|im_end|>\n<|im_start|>assistant\n"
        asked = tokenizer.encode(question).ids
        answered = tokenizer.encode(exchange.answer).ids
        if len(self.ids) + len(asked) + len(answered) + 2 > self.length:
            return False
        newline = tokenizer.encode("\n").ids
        self.ids += [*asked, *answered, EOS_ID, *newline]
        self.kinds += [0] * len(asked) + [ANSWER] * (len(answered) + 1) + [0]
        return True


def _start_row(rng: Random, tokenizer: Tokenizer, length: int) -> Row:
    row = Row(length, [], [])
    if rng.random() < 0.2:
        system = f"<|im_start|>system\n{rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n"
        row.ids = tokenizer.encode(system).ids
        row.kinds = [0] * len(row.ids)
    return row


def _fill_lookup(rng: Random, tokenizer: Tokenizer, row: Row, max_entries: int) -> None:
    """A table, then questions about it with a few other tasks between, until the row is full."""
    num_entries = int(4 * (max_entries / 4) ** rng.random())
    table, *questions = lookup(rng, False, num_entries, num_questions=80)
    while not row.add(tokenizer, table):
        num_entries = num_entries * 3 // 4
        table, *questions = lookup(rng, False, num_entries, num_questions=80)
    for question in questions:
        exchange = draw(rng, held_out=False) if rng.random() < 0.15 else question
        if not row.add(tokenizer, exchange):
            return


def _fill_mixed(rng: Random, tokenizer: Tokenizer, row: Row) -> None:
    """Unrelated tasks in turn; in some chats a name is told early and asked for later."""
    asked = None
    misses = 0
    while misses < 3:
        if asked is None and rng.random() < 0.15:
            told, asked = name_memory(rng, held_out=False)
            row.add(tokenizer, told)
        elif asked is not None and rng.random() < 0.2:
            misses += not row.add(tokenizer, asked)
        else:
            misses += not row.add(tokenizer, draw(rng, held_out=False))


Batch = list[tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]]


def make_batch(
    seed: int,
    step: int,
    tokenizer: Tokenizer,
    prose: npt.NDArray[np.int16],  # [P] token ids of all prose to train on, may be empty
    num_short: int,
    num_long: int,
) -> Batch:
    """Rows of one training step: (ids, kinds) [num_short, 256], then [num_long, 2048] unless 0."""
    rng = Random(f"{seed}/{step}")
    batch = []
    for num_rows, length in ((num_short, SHORT_LEN), (num_long, LONG_LEN)):
        ids = np.full((num_rows, length), PAD_ID, dtype=np.int16)
        kinds = np.zeros((num_rows, length), dtype=np.uint8)
        for index in range(num_rows):
            if length == LONG_LEN and len(prose) > length and rng.random() < 0.2:
                start = rng.randrange(len(prose) - length)
                ids[index], kinds[index] = prose[start : start + length], PROSE
                continue
            row = _start_row(rng, tokenizer, length)
            if rng.random() < (0.6 if length == LONG_LEN else 0.15):
                _fill_lookup(rng, tokenizer, row, 190 if length == LONG_LEN else 16)
            else:
                _fill_mixed(rng, tokenizer, row)
            ids[index, : len(row.ids)] = row.ids
            kinds[index, : len(row.kinds)] = row.kinds
        if num_rows:
            batch.append((ids, kinds))
    return batch


SINGLE_TURN = tuple(task for task in SINGLE_TASKS if task != "small talk")
EVALUATED = ("lookup", *SINGLE_TURN, "name")


def held_out_chats(task: str, num_chats: int) -> list[tuple[list[Message], Exchange]]:
    """Chats that end with a question from the held-out side, and that question with its answer."""
    rng = Random(f"held out/{task}")
    chats = []
    for _ in range(num_chats):
        if task == "lookup":
            turns = lookup(rng, True, rng.randint(20, 190), 1)
        elif task == "name":
            told, asked = name_memory(rng, held_out=True)
            between = rng.choices(SINGLE_TURN, k=rng.randint(0, 4))
            turns = [told, *(draw(rng, True, other) for other in between), asked]
        else:
            turns = [draw(rng, held_out=True, task=task)]
        messages = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for turn in turns:
            messages.append({"role": "user", "content": turn.prompt})
            messages.append({"role": "assistant", "content": turn.answer})
        chats.append((messages[:-1], turns[-1]))
    return chats

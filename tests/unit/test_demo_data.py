"""The demo model's recipe: the split is disjoint, the data repeatable, the files agree."""

import re
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from nanovllm.demo_model import chats, tasks, wording

FOLDER = Path(chats.__file__).parent
NO_PROSE = np.zeros(0, dtype=np.int16)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def questions_in_training_rows(tokenizer, steps):
    """Every user message of some real training rows, read back from their token ids."""
    for step in steps:
        for ids, _ in chats.make_batch(0, step, tokenizer, NO_PROSE, 48, 2):
            for row in ids:
                text = tokenizer.decode(row.tolist(), skip_special_tokens=False)
                yield from re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)


@pytest.mark.parametrize("task", chats.SINGLE_TURN)
def test_held_out_keys_and_prompts_never_occur_in_training(task):
    rng = Random(1)
    trained = [tasks.draw(rng, False, task) for _ in range(1500)]
    held_out = [exchange for _, exchange in chats.held_out_chats(task, 160)]
    assert not any(tasks.is_held_out(exchange.key) for exchange in trained)
    assert all(tasks.is_held_out(exchange.key) for exchange in held_out)
    assert {e.key for e in trained}.isdisjoint({e.key for e in held_out})
    assert {e.prompt for e in trained}.isdisjoint({e.prompt for e in held_out})


def test_held_out_entries_and_names_never_occur_in_training():
    rng = Random(2)
    trained = [e for _ in range(30) for e in tasks.lookup(rng, False, 60, 5)]
    trained += [e for _ in range(300) for e in tasks.name_memory(rng, False)]
    held_out = [e for task in ("lookup", "name") for _, e in chats.held_out_chats(task, 20)]
    assert {e.key for e in trained}.isdisjoint({e.key for e in held_out})
    entry = re.compile(r"^(\w+)(?:: | = | -> )(\w+)$", re.MULTILINE)
    for exchange in trained:  # not only the entries asked for
        for key, value in entry.findall(exchange.prompt) if exchange.task == "lookup" else ():
            assert not tasks.is_held_out(f"lookup|{key}={value}")


def test_real_training_rows_hold_no_held_out_question(tokenizer):
    held_out = {e.prompt for task in chats.EVALUATED for _, e in chats.held_out_chats(task, 160)}
    asked_for_name = {e.prompt for _, e in chats.held_out_chats("name", 160)}  # not a secret
    asked = set(questions_in_training_rows(tokenizer, range(3)))
    assert len(asked) > 1000
    assert asked.isdisjoint(held_out - asked_for_name)


def test_batches_depend_on_seed_and_step_alone(tokenizer):
    prose = np.arange(3, 5003, dtype=np.int16) % 1000
    first, again, other_step, other_seed = (
        chats.make_batch(seed, step, tokenizer, prose, 4, 4)
        for seed, step in ((0, 5), (0, 5), (0, 6), (1, 5))
    )
    for (ids, kinds), (same_ids, same_kinds) in zip(first, again, strict=True):
        assert np.array_equal(ids, same_ids)
        assert np.array_equal(kinds, same_kinds)
    assert not np.array_equal(first[0][0], other_step[0][0])
    assert not np.array_equal(first[0][0], other_seed[0][0])


def test_data_are_those_of_the_shipped_weights():
    """A change of a list's order or a probability would silently make another recipe."""
    rng = Random(3)
    drawn = "\n".join(
        f"{e.prompt} {e.answer}" for e in (tasks.draw(rng, False) for _ in range(500))
    )
    assert zlib.crc32(drawn.encode()) == 2322264620


def test_answers_carry_loss_and_questions_do_not(tokenizer):
    row = chats.Row(64, [], [])
    exchange = tasks.Exchange("sums", "", "1 + 2", "3")
    assert row.add(tokenizer, exchange)
    with_loss = [i for i, kind in zip(row.ids, row.kinds, strict=True) if kind]
    assert tokenizer.decode(with_loss, skip_special_tokens=False) == "3<|im_end|>"


def test_promised_phrasings_are_trained_on():
    assert not any(tasks.is_held_out(key) for key in tasks.ALWAYS_TRAINED)


@pytest.mark.parametrize(
    "text", ["17 + 25 = 42", "héllo, 日本 🙂\n\tx", wording.INTRODUCTION, " ", "a  b\r\n"]
)
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_and_known_words_are_single_tokens(tokenizer):
    for text in (*"0123456789", ", ", *wording.WORDS):
        assert len(tokenizer.encode(text).ids) == 1, text


def test_known_answers():
    assert tasks.join(tasks.primes_up_to(30)) == "2, 3, 5, 7, 11, 13, 17, 19, 23, 29"
    rng = Random(4)
    for _ in range(200):
        exchange = tasks.sums(rng)
        a, b = map(int, re.findall(r"\d+", exchange.prompt))
        assert exchange.answer == str(a + b)


def test_folder_fits_its_promise():
    size = sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file())
    assert size <= 4_500_000

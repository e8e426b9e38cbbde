"""The synthetic tasks of the demo model: what is asked, what is right, and what is held out.

Every exchange names the key on which the split is decided; `is_held_out` is a pure function of that
key, so training and held-out items are disjoint by construction. Knows no tokens; `chats.py` turns
exchanges into training rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from nanovllm.demo_model import wording

HELD_OUT_SHARE = 16  # one key in so many is never trained on
TRAINED_ONLY = "|trained"  # ends the keys that are never held out
# Phrasings that example.py and the README promise to answer, so they are always trained on.
ALWAYS_TRAINED = frozenset(
    {"introduce|introduce yourself", "primes|list all prime numbers within {n}"}
)


@dataclass(frozen=True)
class Exchange:
    """One question with its exact answer."""

    task: str
    key: str  # what the train / held-out split is decided on
    prompt: str
    answer: str


def is_held_out(key: str) -> bool:
    """Whether this key is kept for evaluation; the same on every machine and in every run."""
    trained = key in ALWAYS_TRAINED or key.endswith(TRAINED_ONLY)
    return not trained and zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def primes_up_to(limit: int) -> list[int]:
    """All primes p with 2 <= p <= limit."""
    return [n for n in range(2, limit + 1) if all(n % d for d in range(2, int(n**0.5) + 1))]


def pseudo_word(rng: Random, num_syllables: int) -> str:
    """A pronounceable word that means nothing."""
    syllables = [rng.choice("bdfgklmnprstvwz") + rng.choice("aeiou") for _ in range(num_syllables)]
    return "".join(syllables) + rng.choice(("", "", "n", "r", "s", "l", "k", "t", "m"))


def join(items: Sequence[int] | Sequence[str]) -> str:
    """The one way in which this model writes lists."""
    return ", ".join(map(str, items))


def _phrase(rng: Random, cores: Sequence[str]) -> str:
    """A phrasing in lower case: an optional polite frame around one of the cores."""
    core = rng.choice(cores)
    frames = wording.QUESTION_FRAMES if core.endswith("?") else wording.REQUEST_FRAMES
    return rng.choice(frames).replace("_", core)


def _say(rng: Random, text: str) -> str:
    """Vary what does not matter: the first letter's case and a final full stop."""
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    return text + "." if text[-1] not in "?.!" and rng.random() < 0.3 else text


def introduce(rng: Random) -> Exchange:
    """Who are you, what can you do."""
    phrase = _phrase(rng, wording.INTRODUCE)
    if rng.random() < 0.2:
        phrase = rng.choice(wording.INTRODUCE_QUESTIONS)
    return Exchange("introduce", f"introduce|{phrase}", _say(rng, phrase), wording.INTRODUCTION)


def primes(rng: Random) -> Exchange:
    """List the primes within or below a bound; held out by phrasing."""
    bound = rng.choice(wording.PRIMES_INCLUSIVE + wording.PRIMES_EXCLUSIVE)
    noun = rng.choice(("prime numbers ", "primes ", "prime numbers "))
    core = rng.choice(("all ", "the ", "all the ", "")) + noun + bound
    requests = [f"{verb} {core}" for verb in wording.PRIMES_VERBS]
    phrase = _phrase(rng, [*requests, f"what are {core}?"])
    is_round = rng.random() < 0.3
    n = rng.choice((10, 20, 30, 50, 100, 100, 120, 150)) if is_round else rng.randint(3, 150)
    answer = join(primes_up_to(n - 1 if bound in wording.PRIMES_EXCLUSIVE else n))
    return Exchange("primes", f"primes|{phrase}", _say(rng, phrase).format(n=n), answer)


def count(rng: Random) -> Exchange:
    """Count up, down, or in steps; held out by phrasing."""
    kind = rng.choice(("up", "up", "to", "down", "steps"))
    step = rng.choice((2, 3, 5, 10)) if kind == "steps" else 1
    first = 1 if kind == "to" else rng.choice((0, 1, rng.randint(0, 20), rng.randint(0, 200)))
    last = first + step * rng.randint(1, 30 if rng.random() < 0.7 else 12)
    phrase = _phrase(rng, wording.COUNT[kind])
    numbers = list(range(first, last + 1, step))
    answer = join(numbers[::-1] if kind == "down" else numbers)
    prompt = _say(rng, phrase).format(a=first, b=last, k=step)
    return Exchange("count", f"count|{phrase}", prompt, answer)


def sums(rng: Random) -> Exchange:
    """Add two numbers below 100; held out by the unordered pair."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    prompt = _say(rng, rng.choice(wording.SUMS).format(a=a, b=b))
    return Exchange("sums", f"sums|{min(a, b)}+{max(a, b)}", prompt, str(a + b))


def _word_list(rng: Random) -> list[str]:
    """Distinct words; in a quarter of the lists some of them are made up."""
    words = rng.sample(wording.WORDS, rng.randint(2, 9))
    if rng.random() < 0.25:
        words = [pseudo_word(rng, 2) if rng.random() < 0.4 else word for word in words]
    return list(dict.fromkeys(words))


def _list_task(rng: Random, task: str, cores: str, words: list[str], answer: list[str]) -> Exchange:
    what = rng.choice(wording.LISTS)
    before = rng.choice(("", "", "", "please ", "now "))
    request = before + rng.choice(wording.options(cores))
    request += f"{'' if what == ':' else ' '}{what} {join(words)}"
    # The item is the list itself, whatever is to be done with it.
    return Exchange(task, f"words|{join(words)}", _say(rng, request), join(answer))


def copy(rng: Random) -> Exchange:
    """Repeat a list of words; held out by the list."""
    words = _word_list(rng)
    return _list_task(rng, "copy", "copy | repeat | write again | say again", words, words)


def reverse(rng: Random) -> Exchange:
    """Write a list of words backwards; held out by the list."""
    words = _word_list(rng)
    cores = "reverse | reverse the order of | turn around | write backwards"
    return _list_task(rng, "reverse", cores, words, words[::-1])


def sort(rng: Random) -> Exchange:
    """Put known words into alphabetical order; held out by the list."""
    words = rng.sample(wording.WORDS, rng.randint(2, 7))
    cores = "sort | order | sort alphabetically | put in order"
    return _list_task(rng, "sort", cores, words, sorted(words))


def spell(rng: Random) -> Exchange:
    """Spell a word letter by letter; real words are only trained on, made-up ones are split."""
    is_real = rng.random() < 0.3
    word = rng.choice(wording.WORDS) if is_real else pseudo_word(rng, rng.randint(2, 3))
    key = f"spell|{word}"
    if is_real and is_held_out(key):
        key += TRAINED_ONLY  # a one-token word that was never spelled cannot be spelled
    prompt = _say(rng, rng.choice(wording.SPELL)).format(w=word)
    return Exchange("spell", key, prompt, "-".join(word))


def calendar(rng: Random) -> Exchange:
    """Days of the week and months of the year; held out by phrasing."""
    days, months = wording.DAYS, wording.MONTHS
    if rng.random() < 0.2:
        names, what = rng.choice(((days, "days of the week"), (months, "months of the year")))
        phrase = _phrase(rng, [f"{verb} {what}" for verb in wording.CALENDAR_VERBS])
        return Exchange("calendar", f"calendar|{phrase}", _say(rng, phrase), join(names))
    names, what = rng.choice(((days, "day"), (months, "month")))
    index, shift = rng.randrange(len(names)), 1
    if rng.random() < 0.12:
        phrase = rng.choice(wording.CALENDAR_LENGTH)
        prompt = _say(rng, phrase.format(x=months[index]))
        answer = f"{wording.MONTH_DAYS[index]} days"
        return Exchange("calendar", f"calendar|{phrase}", prompt, answer)
    is_before = rng.random() < 0.5
    cores = wording.CALENDAR_NEXT
    if rng.random() < 0.3:
        shift = rng.randint(2, 4)
        cores = wording.CALENDAR_SHIFT
    way = "before" if is_before else "after"
    phrase = _phrase(rng, [core.format(what=what, way=way) for core in cores])
    answer = names[(index + (-shift if is_before else shift)) % len(names)]
    prompt = _say(rng, phrase).format(x=names[index], n=shift)
    return Exchange("calendar", f"calendar|{phrase}", prompt, answer)


def capitals(rng: Random) -> Exchange:
    """Capitals of countries, both ways; held out by phrasing."""
    country, city = rng.choice(list(wording.CAPITALS.items()))
    if rng.random() < 0.7:
        phrase, x, answer = _phrase(rng, wording.CAPITAL), country, city
    else:
        phrase, x, answer = _phrase(rng, wording.CAPITAL_OF), city, country
    return Exchange("capitals", f"capitals|{phrase}", _say(rng, phrase).format(x=x), answer)


def small_talk(rng: Random) -> Exchange:
    """Greetings, thanks, and an honest no to what two million parameters cannot do."""
    prompt, answer = rng.choice(wording.SMALL_TALK)
    return Exchange("small talk", f"talk|{prompt}{TRAINED_ONLY}", _say(rng, prompt), answer)


def name_memory(rng: Random, held_out: bool) -> tuple[Exchange, Exchange]:
    """Tell a name and, later in the chat, ask for it; held out by the name."""
    name = ""
    while not name or is_held_out(f"name|{name}") != held_out:
        is_real = rng.random() < 0.5
        name = rng.choice(wording.NAMES) if is_real else pseudo_word(rng, 2).capitalize()
    tell = _say(rng, rng.choice(wording.NAME_TOLD)).format(x=name)
    ask = _say(rng, rng.choice(wording.NAME_ASKED))
    return (
        Exchange("name", f"name|{name}", tell, f"Hello {name}! Nice to meet you."),
        Exchange("name", f"name|{name}", ask, f"Your name is {name}."),
    )


def lookup(rng: Random, held_out: bool, num_entries: int, num_questions: int) -> list[Exchange]:
    """A table of key-value entries and questions about it; held out by the entry (key and value).

    The first exchange holds the table; the others only a question each.
    """
    is_numeric, is_made_up = rng.random() < 0.7, rng.random() < 0.4
    entries: dict[str, str] = {}
    while len(entries) < num_entries:
        needs_new = is_made_up or len(entries) > 150
        key = pseudo_word(rng, 2) if needs_new else rng.choice(wording.WORDS)
        value = str(rng.randint(100, 9999)) if is_numeric else rng.choice(wording.WORDS)
        if is_held_out(f"lookup|{key}={value}") == held_out:
            entries.setdefault(key, value)
    mark = rng.choice((": ", " = ", " -> "))
    lines = [rng.choice(wording.TABLE_HEADERS)]
    lines += [f"{key}{mark}{value}" for key, value in entries.items()]
    exchanges = []
    for index in range(num_questions):
        key = rng.choice(list(entries))
        question = _say(rng, rng.choice(wording.LOOKUP)).format(k=key)
        prompt = "\n".join([*lines, question]) if index == 0 else question
        exchanges.append(Exchange("lookup", f"lookup|{key}={entries[key]}", prompt, entries[key]))
    return exchanges


SINGLE_TASKS: dict[str, tuple[Callable[[Random], Exchange], int]] = {  # maker, relative frequency
    "introduce": (introduce, 3),
    "primes": (primes, 8),
    "count": (count, 10),
    "sums": (sums, 16),
    "copy": (copy, 10),
    "reverse": (reverse, 16),
    "sort": (sort, 10),
    "spell": (spell, 8),
    "calendar": (calendar, 10),
    "capitals": (capitals, 6),
    "small talk": (small_talk, 3),
}
_MAKERS = [maker for maker, _ in SINGLE_TASKS.values()]
_FREQUENCIES = [frequency for _, frequency in SINGLE_TASKS.values()]


def draw(rng: Random, held_out: bool, task: str | None = None) -> Exchange:
    """One exchange of a single-turn task (a random one if None) from one side of the split.

    "small talk" is never held out, so a held-out draw must name another task.
    """
    assert task or not held_out, "name the task of a held-out draw"
    maker = SINGLE_TASKS[task][0] if task else rng.choices(_MAKERS, _FREQUENCIES)[0]
    while True:
        exchange = maker(rng)
        if is_held_out(exchange.key) == held_out:
            return exchange

"""Words, facts and phrasings of the demo model's tasks: data only, `tasks.py` decides what is done.

The order of every list is part of the recipe: change it and the training data change.
"""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """The words in a text."""
    return tuple(text.split())


def options(text: str) -> tuple[str, ...]:
    """The alternatives in a text, which are separated by bars; line breaks count as spaces."""
    return tuple(part.strip() for part in " ".join(text.split()).split("|"))


WORDS = words(
    """
    acorn amber anchor angel apple apron arrow atlas autumn badge bagel ball bamboo banana barn
    basket bath beach bean bear bell bench berry bird blanket boat bone book boot bottle bowl box
    branch bread brick bridge broom bucket butter button cabin cake camel candle canoe carpet
    carrot castle cat cave chair cheese cherry circle clock cloud coat coffee coin comet copper
    coral corn cotton crab crown cup curtain daisy deer desk dog dolphin donkey door dragon drum
    duck eagle earth elbow engine falcon farm feather fence field finger fire fish flag flower
    flute fog forest fork fox frog garden gate ghost giraffe glass globe glove goat gold grape
    grass hammer harbor hat hawk heart hill honey horse hotel house ice ink iron island jacket jar
    jelly jewel kettle key king kite knee knife ladder lake lamp leaf lemon letter lime lion
    lizard maple market meadow melon milk mirror monkey moon mountain mouse nail needle nest night
    north ocean olive onion orange otter owl paint panda paper peach pear pen pencil pepper piano
    pillow pilot planet plate plum pocket pond potato queen quilt rabbit radio rain ribbon rice
    river road robin rocket roof rope rose salt sand school shark sheep shell ship shoe silver sky
    snake snow soap sock spoon spring star stone storm sugar summer sun swan table tea tiger tower
    train tree tulip turtle umbrella valley violin wagon wall water whale wheat wheel window
    winter wolf wool yellow zebra
    """
)
NAMES = words(
    """
    Ada Alan Alice Amir Anna Anton Ben Bella Boris Carla Carlos Cecil Chen Clara Daniel David
    Diana Elena Elias Emma Erik Eva Felix Fiona Frank Grace Greta Hana Hans Henry Ida Igor Ines
    Iris Ivan Jack Jane Jonas Julia Karl Kate Kim Lara Leo Lena Linda Louis Lucy Luna Marco Maria
    Mark Martha Max Maya Mia Milan Nadia Nina Noah Nora Olga Oliver Oscar Otto Paul Peter Petra
    Rita Robert Rosa Ruth Sam Sara Simon Sofia Stella Sven Tara Theo Thomas Tina Tom Uma Vera
    Victor Wanda Yara Yuri Zoe
    """
)
CAPITALS = dict(
    pair.split(":")
    for pair in options(
        """
    France:Paris | Germany:Berlin | Italy:Rome | Spain:Madrid | Portugal:Lisbon | England:London |
    Ireland:Dublin | Austria:Vienna | Poland:Warsaw | Greece:Athens | Norway:Oslo | Sweden:Stockholm
    | Finland:Helsinki | Denmark:Copenhagen | Hungary:Budapest | Russia:Moscow | Turkey:Ankara |
    Egypt:Cairo | Kenya:Nairobi | Japan:Tokyo | China:Beijing | India:Delhi | Canada:Ottawa |
    Mexico:Mexico City | Cuba:Havana | Peru:Lima | Chile:Santiago | Australia:Canberra |
    Iceland:Reykjavik | Belgium:Brussels | Romania:Bucharest | Thailand:Bangkok
    """
    )
)
DAYS = options("Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday")
MONTHS = options(
    """
    January | February | March | April | May | June | July | August | September | October |
    November | December
    """
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SYSTEM_PROMPTS = options(
    """
    You are a helpful assistant. | You are a small demo model. Answer briefly. | Answer the user's
    questions. | Be short and exact.
    """
)
INTRODUCTION = (
    "Hello! I am the demo model of nanovllm, a very small language model with about two million "
    "parameters. I can list primes, count, add small numbers, copy, reverse, sort and spell "
    "words, name days, months and capitals, remember your name and look things up in a text."
)
SORRY = "Sorry, I am too small for that. Ask me what I can do."
SMALL_TALK = (
    ("hello", "Hello! How can I help you?"),
    ("hi", "Hello! How can I help you?"),
    ("good morning", "Good morning! How can I help you?"),
    ("thank you", "You are welcome!"),
    ("thanks", "You are welcome!"),
    ("goodbye", "Goodbye!"),
    ("bye", "Goodbye!"),
    ("how are you?", "I am fine, thank you. How can I help you?"),
    *(
        (request, SORRY)
        for request in options(
            """
    tell me a joke | write a poem | write a story | write some code | what is the meaning of life?
    | explain quantum physics | what is the weather like? | who won the game? | translate this
    """
        )
    ),
)

# A polite frame around a request ("_" stands for it) and around a question.
REQUEST_FRAMES = options(
    """
    _ | _ | _ | _ | _ | _ | please _ | _, please | can you _? | could you _? | would you _? | now
    _ | i want you to _ | hello, _ | could you please _? | next, _ | hi! _ | ok, now _ | _ for me
    | _ now | go on and _ | kindly _
    """
)
QUESTION_FRAMES = options("_ | _ | _ | hello, _ | hi! _ | and _ | please tell me: _ | next, _")
INTRODUCE = options(
    """
    introduce yourself | say who you are | tell me who you are | tell me about yourself | describe
    yourself | present yourself | tell me what you can do | say what you are | explain who you are
    | tell me something about you | introduce yourself briefly
    """
)
INTRODUCE_QUESTIONS = options(
    """
    who are you? | what are you? | what can you do? | what is your name?
    """
)
PRIMES_VERBS = options(
    """
    list | give me | name | write down | show me | print | tell me | write | find
    """
)
PRIMES_INCLUSIVE = options(
    """
    within {n} | up to {n} | from 1 to {n} | between 1 and {n} | not above {n} | no larger than
    {n}
    """
)
PRIMES_EXCLUSIVE = options("below {n} | under {n} | less than {n} | smaller than {n}")
COUNT = {
    "up": options(
        """
        count from {a} to {b} | count up from {a} to {b} | list the numbers from {a} to {b} |
        write the numbers from {a} to {b} | give me all numbers from {a} to {b} | list all whole
        numbers from {a} to {b} | start at {a} and count to {b}
        """
    ),
    "to": options(
        """
        count to {b} | count up to {b} | count from one to {b} | list the first {b} numbers
        """
    ),
    "down": options(
        """
        count down from {b} to {a} | count backwards from {b} to {a} | list the numbers from {b}
        down to {a} | count back from {b} to {a}
        """
    ),
    "steps": options(
        """
        count from {a} to {b} in steps of {k} | count from {a} to {b} by {k} | list every number
        from {a} to {b} in steps of {k} | go from {a} to {b} in steps of {k}
        """
    ),
}
SUMS = options(
    """
    what is {a} + {b}? | {a} + {b} | {a} + {b} = ? | add {a} and {b} | what is {a} plus {b}? | how
    much is {a} + {b}? | calculate {a} + {b} | what is the sum of {a} and {b}?
    """
)
LISTS = options("these words: | the words: | this list: | the list: | : | these:")
SPELL = options(
    """
    spell {w} | spell: {w} | spell the word {w} | spell "{w}" | how do you spell {w}?
    """
)
CALENDAR_VERBS = options(
    """
    list the | name the | list all | give me the | write down the | tell me the | say the
    """
)
CALENDAR_NEXT = options(
    """
    which {what} comes {way} {{x}}? | what {what} comes {way} {{x}}? | which {what} is {way}
    {{x}}? | what {what} is right {way} {{x}}? | name the {what} {way} {{x}} | tell me the {what}
    {way} {{x}} | what comes {way} {{x}}? | give me the {what} {way} {{x}} | what is the {what}
    {way} {{x}}?
    """
)
CALENDAR_SHIFT = options(
    """
    which {what} is {{n}} {what}s {way} {{x}}? | what {what} is {{n}} {what}s {way} {{x}}?
    """
)
CALENDAR_LENGTH = options(
    """
    how many days does {x} have? | how many days are in {x}? | how long is {x}?
    """
)
CAPITAL = options(
    """
    what is the capital of {x}? | name the capital of {x} | tell me the capital of {x} | which
    city is the capital of {x}? | capital of {x}
    """
)
CAPITAL_OF = options(
    """
    which country has the capital {x}? | {x} is the capital of which country? | name the country
    whose capital is {x}
    """
)
NAME_TOLD = options(
    """
    my name is {x} | i am {x} | call me {x} | hello, my name is {x} | hi, I am {x} | please call
    me {x}
    """
)
NAME_ASKED = options(
    """
    what is my name? | do you remember my name? | who am I? | tell me my name | say my name
    """
)
TABLE_HEADERS = options(
    """
    Here is a table: | Remember this table: | Look at these entries: | Entries: | Data:
    """
)
LOOKUP = options(
    """
    what is the value of {k}? | what is the value of "{k}"? | look up {k} | look up: {k} | which
    value belongs to "{k}"? | what belongs to {k}? | which value does {k} have? | find {k}
    """
)

# SPDX-License-Identifier: Apache-2.0
"""The texts that the tiny trained Kimi K3 knows how to continue.

A text opens with a dictionary of pairs, ``{K4Q0…}``, and goes on with questions:

    ?K=4;           what the dictionary says of K, at any distance
    +38=1;          the sum of two digits, modulo 10
    <30514>01345;   the digits sorted

Every character is one token, the byte itself.
"""

import random
from string import ascii_uppercase, digits

TASKS = ("recall", "addition", "sorting")
SORTED = 5  # digits to sort
PAIRS = 16  # of the dictionary of a long text


def dictionary(rng: random.Random, pairs: int) -> tuple[str, dict[str, str]]:
    words = {key: rng.choice(digits) for key in rng.sample(ascii_uppercase, pairs)}
    return "{" + "".join(key + value for key, value in words.items()) + "}", words


def question(rng: random.Random, task: str, words: dict[str, str]) -> tuple[str, str]:
    """A question and its answer, which a semicolon ends."""
    if task == "recall":
        key = rng.choice(list(words))
        return f"?{key}=", words[key]
    if task == "addition":
        a, b = rng.choice(digits), rng.choice(digits)
        return f"+{a}{b}=", str((int(a) + int(b)) % 10)
    shuffled = [rng.choice(digits) for _ in range(SORTED)]
    return f"<{''.join(shuffled)}>", "".join(sorted(shuffled))


def text(rng: random.Random, length: int) -> tuple[str, list[tuple[int, int, str]]]:
    """A text of `length` characters, cut anywhere, and (begin, end, task) of its answers."""
    line, words = dictionary(rng, min(PAIRS, length // 10))
    answers = []
    while len(line) < length:
        task = rng.choice(TASKS)
        asked, answer = question(rng, task, words)
        begin = len(line) + len(asked)
        if begin + len(answer) < length:
            answers.append((begin, begin + len(answer), task))
        line += asked + answer + ";"
    return line[:length], answers


def document(rng: random.Random, task: str, length: int) -> dict[str, str]:
    """A prompt of at least `length` characters that ends in a question of `task`, and its answer."""
    line, words = dictionary(rng, min(PAIRS, length // 10))
    while len(line) < length:
        line += "".join(question(rng, rng.choice(TASKS), words)) + ";"
    asked, answer = question(rng, task, words)
    return {"prompt": line + asked, "answer": answer}

"""What a generated solution of a CMath problem answers, and whether it is right."""

import re
import unicodedata
from fractions import Fraction


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def answers(resps: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """The first number after the last 答案是 (the answer is), or else the last number; "" where there is none."""
    return [[_answer(text) for text in texts] for texts in resps]


def exact_match(references: list[str], predictions: list[str]) -> float:
    """1.0 where both are the same number, however written (4.50, 4.5, 9/2), else 0.0."""
    found, wanted = _number(predictions[0]), _number(references[0])
    return float(found is not None and found == wanted)


def _answer(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)  # full-width digits
    _, said, tail = text.rpartition("答案是")
    numbers = NUMBER.findall(tail if said else text)
    return "" if not numbers else numbers[0] if said else numbers[-1]


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(unicodedata.normalize("NFKC", text).replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return None

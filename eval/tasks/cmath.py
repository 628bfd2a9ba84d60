"""Read the answer from a generated solution of a CMath problem, and score it."""

import re
import unicodedata
from fractions import Fraction


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def answers(resps: list[list[str]], docs: list[dict]) -> list[list[str]]:
    """Take the first number after the last 答案是 (the answer is), or else the last number; "" where there is none."""
    return [[_answer(text) for text in texts] for texts in resps]


def exact_match(references: list[str], predictions: list[str]) -> float:
    """Return 1.0 where both are the same number, however written (4.50, 4.5, 9/2), else 0.0."""
    answer, wanted = _number(predictions[0]), _number(references[0])
    return float(answer is not None and answer == wanted)


def _answer(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)  # full-width digits become ASCII
    _, phrase, conclusion = text.rpartition("答案是")
    numbers = NUMBER.findall(conclusion if phrase else text)
    if not numbers:
        return ""
    return numbers[0] if phrase else numbers[-1]


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(unicodedata.normalize("NFKC", text).replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return None

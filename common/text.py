"""The text that checkpoints are compared on."""

from pathlib import Path

from .errors import UserError, describe
from .files import check_file


SAMPLE = """\
The depth of a network is the number of steps a signal takes from its input to its output. In a residual network every
step adds to what came before it, so the last layer sees a sum in which early and late contributions weigh the same. A
reader who has to answer a question about a long report does something else: some answers need the summary on the first
page, some need one figure from the appendix, and most need the paragraph that was just read. Reading with attention
over depth gives each layer that choice, token by token, at the price of one small vector a layer.

def mean_of_sources(sources):
    total = sources[0]
    for source in sources[1:]:
        total = total + source
    return total / len(sources)

Die Zugspitze ist mit 2962 Metern der höchste Berg Deutschlands. La tour Eiffel mesure 330 mètres.
富士山の高さは三千七百七十六メートルです。
1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987; 3.14159265358979; (a + b)^2 = a^2 + 2ab + b^2.
"""


def read_text(path: Path | None) -> tuple[str, str]:
    """Read the text of a file, or return the built-in sample; and what to call it.

    Raises:
        UserError: it is no file, cannot be read as UTF-8, or is empty.
    """
    if path is None:
        return SAMPLE, "the built-in sample"
    check_file(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {describe(error)}.") from error
    if not text.strip():
        raise UserError(f"{path} is empty; expected some text.")
    return text, str(path)

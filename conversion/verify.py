"""Whether a port holds the same tensors as its source and this library's code, tokenises and computes the same."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE, TOKENIZER_CONFIG_FILE

import modeling_attnres  # noqa: F401, registers the families with the Auto classes
from common.errors import reading
from common.quiet import quiet_transformers
from common.text import read_text
from model_cards.provenance import NAME as PROVENANCE
from model_cards.provenance import Verified, hash_files
from model_cards.provenance import read as read_provenance

from .checkpoint import CONFIG_NAME, Checkpoint, CheckpointError, open_source, read_json
from .writing import differing_code


MAX_TOKENS = 512  # of a text
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "tekken.json")
TOLERANCE = 3e-6  # relative logit error in fp32
QUANTISED_TOLERANCE = 1e-1  # bf16 or int8 activations: a mean rounds to other values than a sum


@dataclass(frozen=True)
class Verification:
    """What a comparison of a source and its port found."""

    tensors: int
    differing: tuple[str, ...]  # tensors
    differing_settings: tuple[str, ...]  # fields of config.json that both families have
    differing_files: tuple[str, ...]
    depth_tensors: int
    expected_depth_tensors: int
    same_tokenizer: bool | None  # None: neither has one
    tokens: int
    text: str
    relative_error: float
    top1_agreement: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return (
            not self.differing
            and not self.differing_settings
            and not self.differing_files
            and self.depth_tensors == self.expected_depth_tensors
            and self.same_tokenizer is not False
            and self.relative_error <= self.tolerance
        )

    def record(self) -> Verified:
        """Return what a model card says of it."""
        return Verified(self.relative_error, self.tokens, self.text)

    @property
    def lines(self) -> dict[str, list[str]]:
        """The findings in words, by what was compared."""
        equal = self.tensors - len(self.differing)
        tokenizer = {True: "the same token ids", False: "OTHER TOKEN IDS than the source's", None: "none to compare"}
        return {
            "tensors": [
                f"{equal:,} of {self.tensors:,} equal byte for byte",
                *(f"differs: {name}" for name in self.differing[:5]),
            ],
            "settings": [f"DIFFERS: {name}" for name in self.differing_settings[:5]] or ["equal to the source's"],
            "depth": [f"{self.depth_tensors} of {self.expected_depth_tensors} depth tensors present"],
            "files": [f"DIFFERS: {file}" for file in self.differing_files[:5]] or ["code and hashes as they should be"],
            "tokenizer": [tokenizer[self.same_tokenizer]],
            "logits": [
                f"relative error {self.relative_error:.1e} over {self.tokens} tokens of {self.text} "
                f"(tolerance {self.tolerance:.0e})",
                f"same most likely token at {self.top1_agreement:.2%} of the tokens",
            ],
            "verified": ["yes" if self.passed else "NO"],
        }

    def __str__(self) -> str:
        return "\n".join(
            f"{name if index == 0 else '':<11}{line}"
            for name, lines in self.lines.items()
            for index, line in enumerate(lines)
        )

    @property
    def in_one_line(self) -> str:
        """The findings in one line, for an error."""
        return "; ".join(f"{name} {', '.join(lines)}" for name, lines in self.lines.items())


def verify_port(source: str, target: str, text: Path | None = None) -> Verification:
    """Compare a source (folder, hub id or GGUF file) with its port.

    Raises:
        UserError: one of them cannot be read, or the target is no Attention Residuals checkpoint.

    Example:
        from conversion.verify import verify_port

        verification = verify_port("demo/checkpoints/SmolLM2-135M-Instruct", "ported")
        assert verification.passed, verification
    """
    with open_source(source) as base, open_source(target) as port:
        return verify_checkpoints(base, port, text)


def verify_checkpoints(base: Checkpoint, port: Checkpoint, text: Path | None = None) -> Verification:
    """Compare two open checkpoints as `verify_port` does. One tensor of each, then one model is in memory at a time."""
    if not port.is_attnres:
        raise CheckpointError(f"{port.folder}: {port.config['model_type']!r} is no Attention Residuals family.")
    sample, name = read_text(text)
    # Tensors; both tokenizers on the sample; logits [1, T, vocabulary] for the token ids of the source's.
    differing = tuple(_differing_tensors(base, port))
    depth = port.expected_depth_names(port.read_config())
    token_ids = [_token_ids(checkpoint.folder, sample) for checkpoint in (base, port)]
    ids, base_logits, port_logits = _logits_of_both(base, port, sample, token_ids[0])
    return Verification(
        tensors=len(base.weight_map),
        differing=differing,
        differing_settings=tuple(_differing_settings(base, port)),
        differing_files=tuple(_differing_files(base, port)),
        depth_tensors=sum(tensor in port.weight_map for tensor in depth),
        expected_depth_tensors=len(depth),
        same_tokenizer=None if token_ids == [None, None] else token_ids[0] == token_ids[1],
        tokens=ids.shape[1],
        text=name,
        relative_error=_relative_error(port_logits, base_logits),
        top1_agreement=(port_logits.argmax(-1) == base_logits.argmax(-1)).double().mean().item(),
        tolerance=TOLERANCE if base.quantisation is None else QUANTISED_TOLERANCE,
    )


def _differing_settings(base: Checkpoint, port: Checkpoint) -> list[str]:
    """Name the fields of the base family that the port sets otherwise: a text may be too short to show it."""
    base_fields, port_fields = (checkpoint.read_config().to_dict() for checkpoint in (base, port))
    own = {"architectures", "auto_map", "transformers_version"}
    return [
        f"{name}: {port_fields.get(name)!r:.60}, the source's is {base_fields.get(name)!r:.60}"
        for name in sorted((base_fields.keys() | port_fields.keys()) - own)
        if not name.startswith("attn_res_") and base_fields.get(name) != port_fields.get(name)
    ]


def relative_difference(base: Checkpoint, port: Checkpoint) -> float:
    """Return the relative difference of two checkpoints' logits on the built-in sample."""
    sample, _ = read_text(None)
    _, base_logits, port_logits = _logits_of_both(base, port, sample, _token_ids(base.folder, sample))
    return _relative_error(port_logits, base_logits)


def _logits_of_both(
    base: Checkpoint, port: Checkpoint, text: str, token_ids: list[int] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a text's token ids `[1, T]`, and the logits of both models; one is in memory at a time."""
    base.read_config()  # or a model larger than its tensors would be built
    ids = _ids_or_bytes(token_ids, text, port.read_config().vocab_size)
    return ids, _outputs(base, ids), _outputs(port, ids)


def _relative_error(values: torch.Tensor, expected: torch.Tensor) -> float:
    return ((values - expected).norm() / expected.norm()).item()


def _differing_tensors(base: Checkpoint, port: Checkpoint) -> Iterator[str]:
    """Name the source's tensors that the port lacks or holds with other bytes, and those it has besides."""
    with base.open_tensors() as read_base, port.open_tensors() as read_port:
        for name in tqdm(base.weight_map, desc="comparing tensors", unit="tensor"):
            if name not in port.weight_map or not _same_bytes(read_base(name), read_port(name)):
                yield name
    depth = port.expected_depth_names(port.read_config())
    yield from sorted(port.weight_map.keys() - base.weight_map.keys() - {*depth})


def _differing_files(base: Checkpoint, port: Checkpoint) -> Iterator[str]:
    """Name the port's files whose code is not this library's or the source's, or that are not as recorded."""
    yield from differing_code(port.folder, base.folder)
    if port.config.get("auto_map") != port.read_config().remote_code():
        yield f"{CONFIG_NAME}: auto_map"
    provenance = read_provenance(port.folder)
    recorded = {} if provenance is None else provenance.files
    present = [name for name in recorded if Path(name).name == name and (port.folder / name).is_file()]
    hashes = hash_files([port.folder / name for name in present])
    yield from (f"{name} is not what {PROVENANCE} has" for name in recorded if hashes.get(name) != recorded[name])


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Say whether two tensors are the same in dtype, shape and bytes, where NaN is NaN and -0 is not 0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left_bytes, right_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(left_bytes, right_bytes)


def tokenize(folder: Path, text: str, vocab_size: int) -> torch.Tensor:
    """Return the text's token ids `[1, T]`; its bytes in their place where there is no tokenizer."""
    return _ids_or_bytes(_token_ids(folder, text), text, vocab_size)


def _ids_or_bytes(token_ids: list[int] | None, text: str, vocab_size: int) -> torch.Tensor:
    return torch.tensor([token_ids or [byte % max(vocab_size, 1) for byte in text.encode()[:MAX_TOKENS]]])


def _token_ids(folder: Path, text: str) -> list[int] | None:
    """Return a text's token ids, or `None` where there is no tokenizer."""
    tokenizer = load_tokenizer(folder)
    with reading(f"{folder}: a text by its tokenizer"):
        return None if tokenizer is None else tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a checkpoint: `None` where there is none, or one that is code, which is not run.

    Raises:
        UserError: its files are malformed.
    """
    if not any(path for glob in TOKENIZER_FILES for path in folder.glob(glob)):
        return None  # transformers would make an empty one for some families
    for file in (FULL_TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        if (folder / file).exists():
            read_json(folder / file)  # or what is no JSON would count as none
    with reading(f"{folder}: its tokenizer"):
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError):
            return None


def _outputs(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """Return logits (of a model without a head the last hidden state) in fp64; they are computed in fp32."""
    auto_class = AutoModelForCausalLM if checkpoint.has_head else AutoModel
    size = sum((checkpoint.folder / name).stat().st_size for name in checkpoint.shards)
    dtype = {} if checkpoint.quantisation else {"dtype": torch.float32}
    with quiet_transformers(), tempfile.TemporaryDirectory() as offload, torch.no_grad():
        # Four bytes per parameter may be twice the file; what does not fit is read layer by layer from disk.
        too_large = 2 * size > psutil.virtual_memory().available
        placement = {"device_map": "auto", "offload_folder": offload} if too_large else {}
        with reading(f"{checkpoint.folder}: its model"):
            model = auto_class.from_pretrained(checkpoint.folder, trust_remote_code=False, **dtype, **placement).eval()
            return model(ids, use_cache=False)[0].double().cpu()

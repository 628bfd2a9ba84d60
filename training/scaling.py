"""Scaling laws: fit loss against compute for each mode, and say what their difference is worth in compute.

Shapes: B resamples, S sizes of model.
"""

import csv
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize_scalar, nnls
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import reading
from common.files import check_file, complete_or_absent, files_below
from conversion.checkpoint import read_json
from modeling_attnres import is_depth_parameter

from .checkpoints import finite_or_null
from .loading import TrainingError
from .pictures import draw_scaling


PFLOP_DAYS = 1e15 * 86400  # floating-point operations of one PFLOP/s-day
RESULT = "result.json"  # what a finished run leaves in its folder
NUMBERS = ("parameters", "tokens", "loss")  # of every run, all above 0
EXPONENTS = (1e-3, 2.0)  # where the exponent of a law with a floor is looked for
RESAMPLES = 1000


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        mode: its label, one line in the picture: "none", "block", "full", or any other.
        seed: which repetition it is; the same seed in two modes means the same data in the same order.
        parameters: active for a token, embeddings aside.
        tokens: how many it was trained on.
        loss: at its end, on held-out text.
        flops_per_token: of training; by default 6 a parameter.
    """

    mode: str
    seed: int
    parameters: float
    tokens: float
    loss: float
    flops_per_token: float | None = None

    @property
    def compute(self) -> float:
        """What it took, in PFLOP/s-days."""
        each = 6 * self.parameters if self.flops_per_token is None else self.flops_per_token
        return each * self.tokens / PFLOP_DAYS


@dataclass(frozen=True)
class Size:
    """The runs of one mode that differ in their seeds alone."""

    compute: float
    parameters: float
    tokens: float
    seeds: tuple[int, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Law:
    """Loss = floor + amplitude · compute ^ -exponent."""

    amplitude: float
    exponent: float
    floor: float = 0.0

    def loss_at(self, compute: float) -> float:
        """Return the loss that some compute gives."""
        return self.floor + self.amplitude * compute**-self.exponent

    def compute_for(self, loss: float) -> float:
        """Return the compute that gives a loss: infinite at the floor and below, NaN if more compute does not help."""
        if self.exponent <= 0:
            return math.nan
        if loss <= self.floor:
            return math.inf
        with np.errstate(over="ignore"):
            return float(np.float64(self.amplitude / (loss - self.floor)) ** (1 / self.exponent))


def scale_modes(paths: list[Path], output: Path, *, baseline: str = "none", compute: float | None = None) -> dict:
    """Fit scaling laws to runs, and write `scaling.json` and a picture to a folder; returns what was found.

    Example:
        ```python
        from pathlib import Path

        from training.scaling import scale_modes

        scaling = scale_modes([Path("training/paper_scaling.csv")], Path("pictures"), compute=5.6)
        print(scaling["modes"]["block"]["laws"]["A·C^-α"]["worth"]["value"])
        ```

    Args:
        paths: CSV or JSON files of runs, or folders in which runs left their `result.json`.
        output: the folder to write.
        baseline: the mode that others are compared with.
        compute: where they are compared, in PFLOP/s-days; `None`: the largest that all modes have.

    Raises:
        UserError: the runs cannot be read or fitted, or the folder exists.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise TrainingError(f"{output} exists and is not empty.")
    if compute is not None and not 0 < compute < math.inf:
        raise TrainingError(f"--compute must be above 0, got {compute}.")
    scaling = compare_modes(read_runs(paths), baseline, compute)
    write_scaling(scaling, output)
    print_scaling(scaling)
    return scaling


def count_active_parameters(model: PreTrainedModel) -> int:
    """Count the parameters a token meets, without embeddings and depth parameters, so that all modes have as many."""
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    active = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) not in ends and not is_depth_parameter(name):
            share = model.config.num_experts_per_tok / parameter.shape[0] if ".experts." in name else 1
            active += parameter.numel() * share
    return round(active)


def count_flops_per_token(config: PreTrainedConfig, parameters: int, length: int) -> int:
    """Count the operations that training on a token takes: 6 a parameter, and those of full attention.

    Those are 12 · length · width of all heads in each layer: two products, each forward and twice backward, over all
    positions, or over the window of a layer that has one. What linear and depth attention take is left out, as it grows
    with neither length nor parameters.
    """
    window = getattr(config, "sliding_window", None)
    usual = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    positions = {
        "full_attention": length,
        "sliding_attention": min(length, window or length),
        "chunked_attention": min(length, getattr(config, "attention_chunk_size", None) or length),
    }
    heads = config.num_attention_heads
    of_head = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    return 6 * parameters + 12 * heads * of_head * sum(positions.get(kind, 0) for kind in types)


def describe_run(model: PreTrainedModel, length: int, tokens: int, seed: int, loss: float) -> dict:
    """Describe a run as `read_run` reads it."""
    parameters = count_active_parameters(model)
    flops = count_flops_per_token(model.config, parameters, length)
    return asdict(Run(model.config.attn_res_mode, seed, parameters, tokens, loss, flops))


def read_runs(paths: list[Path]) -> list[Run]:
    """Read runs from CSV and JSON files, and from folders in which runs left their `result.json`.

    Raises:
        UserError: a file cannot be read, a record lacks a field or has a wrong one, or a run is there twice.
    """
    runs = [read_run(record, where) for path in paths for record, where in read_records(Path(path))]
    if not runs:
        raise TrainingError(f"{', '.join(map(str, paths))}: no runs.")
    counts = Counter((run.mode, run.seed, run.parameters, run.tokens) for run in runs)
    for (mode, seed, parameters, tokens), count in counts.items():
        if count > 1:
            raise TrainingError(
                f"{count} runs of mode {mode!r}, seed {seed}, {parameters:g} parameters and {tokens:g} tokens; "
                "expected one. Of several learning rates, give the best alone."
            )
    return runs


def read_records(path: Path) -> Iterator[tuple[object, str]]:
    """Yield the records of runs at a path, each with where it was found. This alone knows how they are stored."""
    if path.is_dir():
        files = [file for file in files_below(path) if file.name == RESULT]
        if not files:
            raise TrainingError(f"{path}: no {RESULT} in it or below; expected those of finished runs.")
        for file in files:
            yield read_json(file).get("run"), f"{file}, run"
    elif path.suffix.lower() == ".csv":
        check_file(path)
        with reading(path), open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [(row, f"{path}, line {reader.line_num}") for row in reader]
        yield from rows
    elif path.suffix.lower() == ".json":
        content = read_json(path)
        records = content.get("runs", [content])
        if not isinstance(records, list):
            raise TrainingError(f"{path}: runs: expected a list, found {str(records)[:40]!r}.")
        yield from ((record, f"{path}, run {number}") for number, record in enumerate(records, 1))
    else:
        check_file(path)
        raise TrainingError(f"{path}: expected a .csv or .json file of runs, or a folder of them.")


def read_run(record: object, where: str) -> Run:
    """Make a run of a record; fields that it does not need are passed over.

    Raises:
        TrainingError: names the field, what was found and what was expected.
    """
    needed = ("mode", "seed", *NUMBERS)
    if not isinstance(record, dict):
        raise TrainingError(f"{where}: expected an object with {', '.join(needed)}, found {str(record)[:40]!r}.")
    for name in needed:
        if record.get(name) in (None, ""):
            raise TrainingError(f"{where}: no {name!r}; expected {', '.join(needed)}.")
    given = [*NUMBERS, *(["flops_per_token"] if record.get("flops_per_token") not in (None, "") else [])]
    numbers = {name: read_number(record[name], name, where) for name in given}
    try:
        seed = int(str(record["seed"]))
    except ValueError:
        raise TrainingError(f"{where}: seed: expected a whole number, found {record['seed']!r}.") from None
    return Run(str(record["mode"]), seed, **numbers)


def read_number(value: object, name: str, where: str) -> float:
    """Read a finite number above 0.

    Raises:
        TrainingError: it is anything else.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise TrainingError(f"{where}: {name}: expected a number above 0, found {value!r}.")
    return number


def group_runs(runs: list[Run]) -> dict[str, list[Size]]:
    """Group runs by mode and size, the sizes in order of compute.

    Raises:
        TrainingError: a mode has one size: no line goes through one point.
    """
    grouped = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: run.seed):
        grouped[run.mode][run.compute, run.parameters, run.tokens].append(run)
    modes = {
        mode: [
            Size(compute, parameters, tokens, tuple(run.seed for run in same), tuple(run.loss for run in same))
            for (compute, parameters, tokens), same in sorted(sizes.items())
        ]
        for mode, sizes in grouped.items()
    }
    for mode, sizes in modes.items():
        if count_computes(sizes) < 2:
            raise TrainingError(
                f"mode {mode!r}: all its runs took {sizes[0].compute:.4g} PFLOP/s-days; a line needs two sizes or more."
            )
    return modes


def count_computes(sizes: list[Size]) -> int:
    """Count the places on the axis of compute."""
    return len({size.compute for size in sizes})


def fit_power_law(compute_S: np.ndarray, loss_S: np.ndarray) -> Law:
    """Fit loss = A · C^-α by least squares of log loss, as a line in the log-log picture."""
    x_S, y_S = np.log(compute_S), np.log(loss_S)
    deviation_S = x_S - x_S.mean()
    slope = deviation_S @ y_S / (deviation_S @ deviation_S)
    return Law(amplitude=float(np.exp(y_S.mean() - slope * x_S.mean())), exponent=float(-slope))


def fit_law_with_floor(compute_S: np.ndarray, loss_S: np.ndarray) -> Law:
    """Fit loss = E + A · C^-α, E and A not negative, by least squares of the relative error."""
    unit = float(np.exp(np.log(compute_S).mean()))  # powers of C / unit are of a size with 1

    def solve(exponent: float) -> tuple[np.ndarray, float]:
        """Find the best E and A for an exponent, and what error is left."""
        columns = np.stack([np.ones_like(compute_S), (compute_S / unit) ** -exponent], axis=1)
        return nnls(columns / loss_S[:, None], np.ones_like(loss_S))

    # In log α, where the valley is about as wide everywhere
    found = minimize_scalar(lambda log: solve(math.exp(log))[1], bounds=np.log(EXPONENTS), method="bounded")
    exponent = math.exp(found.x)
    floor, amplitude = solve(exponent)[0]
    return Law(float(amplitude * unit**exponent), exponent, float(floor))


# By name: how it is fitted, and the number of sizes it needs, where a floor needs one to spare
LAWS: dict[str, tuple[Callable[[np.ndarray, np.ndarray], Law], int]] = {
    "A·C^-α": (fit_power_law, 2),
    "E + A·C^-α": (fit_law_with_floor, 4),
}


def resample_losses(modes: dict[str, list[Size]], resamples: int) -> dict[str, np.ndarray | None]:
    """Draw seeds with replacement, size by size, and return each mode's mean losses `[B, S]`; None without seeds.

    Modes with the same seeds are drawn together, as a seed's data is theirs in common. A mean of n draws would vary by
    (n - 1) / n of what a mean of n runs does, which is much for 3 seeds, so deviations are drawn that much larger.
    """
    generator, drawn, means = np.random.default_rng(0), {}, {}
    for mode, sizes in modes.items():
        if any(len(size.seeds) < 2 for size in sizes):
            means[mode] = None
            continue
        columns = []
        for rank, size in enumerate(sizes):
            count = len(size.seeds)
            if (rank, size.seeds) not in drawn:
                drawn[rank, size.seeds] = generator.integers(count, size=(resamples, count))
            mean = np.mean(size.losses)
            larger = mean + (np.array(size.losses) - mean) * math.sqrt(count / (count - 1))
            columns.append(larger[drawn[rank, size.seeds]].mean(axis=1))
        means[mode] = np.stack(columns, axis=1)
    return means


def compare_modes(
    runs: list[Run],
    baseline: str = "none",
    compute: float | None = None,
    laws: tuple[str, ...] = tuple(LAWS),
    resamples: int = RESAMPLES,
) -> dict:
    """Fit every mode's laws, and compute what each mode is worth: how many times its compute the baseline needs.

    Args:
        runs: of two sizes or more in every mode.
        baseline: the mode that the others are compared with.
        compute: where they are compared, in PFLOP/s-days; by default the largest that every mode has a run of.
        laws: which of `LAWS`.
        resamples: how often seeds are drawn, for intervals of 95 %.

    Raises:
        TrainingError: there are no runs of the baseline, or a mode has one size.
    """
    modes = group_runs(runs)
    if baseline not in modes:
        raise TrainingError(f"no runs of the baseline {baseline!r}, found {', '.join(modes)}: see --baseline.")
    if compute is None:
        compute = min(sizes[-1].compute for sizes in modes.values())
    means = resample_losses(modes, resamples)
    found = {mode: {"sizes": [asdict(size) for size in sizes], "laws": {}} for mode, sizes in modes.items()}
    for name in laws:
        fit, needed = LAWS[name]
        fitted = {
            mode: fit_resampled(fit, sizes, means[mode], f"{name}, {mode}")
            for mode, sizes in modes.items()
            if count_computes(sizes) >= needed
        }
        for mode in fitted:
            of_baseline = None if mode == baseline else fitted.get(baseline)
            found[mode]["laws"][name] = describe_law(fitted[mode], of_baseline, compute)
    return {"unit of compute": "PFLOP/s-days", "baseline": baseline, "compute": compute, "modes": found}


def fit_resampled(
    fit: Callable[[np.ndarray, np.ndarray], Law], sizes: list[Size], means_BS: np.ndarray | None, what: str
) -> list[Law]:
    """Fit a law to a mode's mean losses, and then to each of the resampled ones."""
    compute_S = np.array([size.compute for size in sizes])
    loss_S = np.array([np.mean(size.losses) for size in sizes])
    resampled = [] if means_BS is None else tqdm(means_BS, desc=f"resampling {what}", leave=False, delay=1)
    return [fit(compute_S, loss_S), *(fit(compute_S, means_S) for means_S in resampled)]


def describe_law(laws: list[Law], of_baseline: list[Law] | None, compute: float) -> dict[str, dict]:
    """Describe a fitted law, with those that resampling gave for its intervals."""
    described = {
        "amplitude": estimate([law.amplitude for law in laws]),
        "exponent": estimate([law.exponent for law in laws]),
        "floor": estimate([law.floor for law in laws]),
        "loss": estimate([law.loss_at(compute) for law in laws]),
    }
    if of_baseline is not None:  # draw by draw, as far as both have been resampled
        described["worth"] = estimate(
            [base.compute_for(law.loss_at(compute)) / compute for law, base in zip(laws, of_baseline)]
        )
    return described


def estimate(values: list[float]) -> dict[str, float | None]:
    """Make an estimate of a value and the same of resampled runs: with a 95 % interval, if all of them are numbers."""
    value, *resampled = values
    low, high = (None, None)
    if resampled and not np.isnan(resampled).any():
        low, high = np.quantile(resampled, [0.025, 0.975], method="nearest").tolist()
    return {"value": value, "low": low, "high": high}


def write_scaling(scaling: dict, output: Path) -> None:
    """Write `scaling.json` and a picture to a folder, complete or absent."""
    with complete_or_absent(output) as folder:
        (folder / "scaling.json").write_text(json.dumps(finite_or_null(scaling), indent=1) + "\n")
        draw_scaling(scaling, folder / "scaling.png")


def print_scaling(scaling: dict) -> None:
    """Print the laws as a table."""
    table = Table(title=f"compared at {scaling['compute']:.4g} PFLOP/s-days with {scaling['baseline']}")
    for heading in ("mode", "law", "E", "A", "α", "loss there", "worth, × compute"):
        table.add_column(heading)
    for mode, of_mode in scaling["modes"].items():
        for name, law in of_mode["laws"].items():
            quantities = ("floor", "amplitude", "exponent", "loss", "worth")
            table.add_row(mode, name, *(in_words(law.get(quantity)) for quantity in quantities))
    console = Console(markup=False)
    console.print(table)
    single = [mode for mode, of_mode in scaling["modes"].items() if any(len(s["seeds"]) < 2 for s in of_mode["sizes"])]
    if single:
        console.print(f"No intervals for {', '.join(single)}: they need two seeds or more of every size.")


def in_words(found: dict | None) -> str:
    """Write an estimate with its interval."""
    if found is None:
        return ""
    interval = "" if found["low"] is None else f" [{found['low']:.4g}, {found['high']:.4g}]"
    return f"{found['value']:.4g}{interval}"

"""The table at the end of a run: success on the same tasks of demonstrator, SFT, RL and control, with intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from glm_jax.config import ExperimentConfig
from glm_jax.rl.statistics import mean_interval, paired_interval

COLUMNS = ("demonstrator", "sft", "rl", "control")


@dataclasses.dataclass(frozen=True)
class Summary:
    document: dict  # summary.json, see experiments.report
    text: str


def summarise(results: Mapping[str, Mapping[str, np.ndarray]], environments: Sequence[str], config: ExperimentConfig) -> Summary:
    """results[column][kind]: float [N], kind "sampled" or "greedy", entry i of the task of environments[i]; a mean is over environments."""
    names = list(dict.fromkeys(environments))
    of = np.array(environments)
    columns = [column for column in COLUMNS if column in results]
    rows = []
    for name in [*names, "mean"]:
        row = {"environment": name}
        for column in columns:
            row[column] = {
                kind: mean_interval(values, groups=of) if name == "mean" else mean_interval(values[of == name])
                for kind, values in results[column].items()}
        rows.append(row)
    paired = {}
    for other in ("demonstrator", "control", "sft"):
        if "rl" in results and other in results:
            paired[f"rl - {other}"] = paired_interval(results["rl"]["sampled"], results[other]["sampled"], groups=of)
    document = {
        "table": rows, "paired": paired, "seed": config.seed, "split": config.evaluation.split, "tasks": config.evaluation.tasks,
        "temperature": config.evaluation.temperature, "fault_rate": config.sft.fault_rate}
    return Summary(document, text(rows, columns, paired, document))


def text(rows: list[dict], columns: list[str], paired: Mapping, document: Mapping) -> str:
    width = max(len(row["environment"]) for row in rows) + 2
    lines = [
        f"success on {document['tasks']} {document['split']} tasks an environment, sampled at temperature {document['temperature']:g} "
        f"(greedy in brackets); the demonstrator errs in {document['fault_rate']:.0%} of its episodes",
        "".ljust(width) + "".join(column.rjust(16) for column in columns),
    ]
    for row in rows:
        cells = []
        for column in columns:
            cell = f"{row[column]['sampled'][0]:.3f}"
            if "greedy" in row[column]:
                cell += f" ({row[column]['greedy'][0]:.3f})"
            cells.append(cell.rjust(16))
        lines.append(row["environment"].ljust(width) + "".join(cells))
    for name, (mean, low, high) in paired.items():
        lines.append(f"{name}: {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}")
    return "\n".join(lines)

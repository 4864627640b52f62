"""Loading, overriding, saving and reloading of experiment configs.

A named config is a module experiments/configs/NAME.py with `config() -> ExperimentConfig`; it may also define
`debug(config) -> ExperimentConfig` (a run of seconds) and `sweep_X() -> list of tuples of "a.b=v"` (one tuple a run).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pathlib
import pkgutil
import types
import typing
from collections.abc import Iterable, Sequence

import omegaconf
import yaml
from omegaconf import OmegaConf

from experiments import configs
from glm_jax.config import ConfigError, ExperimentConfig, require
from glm_jax.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

if typing.TYPE_CHECKING:
    from glm_jax.model import ModelConfig


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known names closest to `name`, or all of them when none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(known) or 'none'}"


def list_configs() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def config_module(name: str) -> types.ModuleType:
    """The module of the named config. Raises: ConfigError naming the nearest config."""
    if name not in list_configs():
        raise ConfigError(f"no config named {name!r}: {nearest(name, list_configs())}")
    return importlib.import_module(f"{configs.__name__}.{name}")


def load(name: str, overrides: Sequence[str] = (), *, debug: bool = False) -> ExperimentConfig:
    """The named config; `debug` shrinks it; then `overrides`, in turn, have the last word. Raises: ConfigError."""
    module = config_module(name)
    config = module.config()
    if debug:
        config = getattr(module, "debug", shrink)(config)
    return override(config, overrides)


def shrink(config: ExperimentConfig) -> ExperimentConfig:
    """A run of the same parts in little time, for configs that define no `debug` of their own."""
    steps = min(config.sft.steps, 10)
    return dataclasses.replace(
        config,
        sft=dataclasses.replace(
            config.sft,
            steps=steps,
            dense_steps=min(config.sft.dense_steps, steps // 2),
            warmup_steps=min(config.sft.warmup_steps, steps // 2),
            demonstrations=min(config.sft.demonstrations, 64),
        ),
        rl=dataclasses.replace(config.rl, updates=min(config.rl.updates, 2)),
        evaluation=dataclasses.replace(config.evaluation, tasks=min(config.evaluation.tasks, 8)),
    )


def sweeps(name: str) -> dict[str, list[tuple[str, ...]]]:
    """The sweeps of the named config: name -> one tuple of overrides a run."""
    members = vars(config_module(name)).items()
    return {key.removeprefix("sweep_"): [tuple(run) for run in member()] for key, member in members if key.startswith("sweep_")}


def override(config: ExperimentConfig, overrides: Sequence[str]) -> ExperimentConfig:
    """`config` with every "a.b=v" applied, values read as YAML and converted to the field's type. Raises: ConfigError."""
    if not overrides:
        return config
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text!r} is not an override: write key=value, e.g. rl.updates=10")
        _check_key(key, ExperimentConfig)
    return _merge(config, OmegaConf.from_dotlist(list(overrides)))


def value(config: ExperimentConfig, key: str) -> object:
    """What "a.b" is in `config`; None below model.overrides where nothing is set."""
    here = config
    for part in key.split("."):
        here = here.get(part) if isinstance(here, dict) else getattr(here, part, None)
    return here


def save(config: ExperimentConfig, path: pathlib.Path | str) -> None:
    """Write the resolved config as YAML; `reload` gives an equal one."""
    pathlib.Path(path).write_text(to_yaml(config))


def to_yaml(config: ExperimentConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def reload(path: pathlib.Path | str) -> ExperimentConfig:
    """The config that `save` wrote. A file of another version of the code fails on the key that changed. Raises: ConfigError."""
    try:
        saved = OmegaConf.load(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist: a run directory holds config.yaml") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not readable: {error}") from None
    for key in _leaf_keys(saved):
        _check_key(key, ExperimentConfig)
    return _merge(ExperimentConfig, saved)


def check_environments(config: ExperimentConfig) -> None:
    """Refuse environments that are not registered. Apart from the rest because it imports them. Raises: ConfigError."""
    from glm_jax import environments

    known = list(environments.registered())
    for environment in config.environments:
        if environment not in known:
            raise ConfigError(f"environments: {environment} is not registered: {nearest(environment, known)}")


def model_config(config: ExperimentConfig) -> ModelConfig:
    """The model that the config asks for, checked against the rest of the config. Imports JAX. Raises: ConfigError."""
    from glm_jax.model import get_preset

    try:
        model = get_preset(config.model.preset, **config.model.preset_overrides)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    check_model(config, model)
    if (known := tokenizer(config).vocab_size) > model.vocab_size:
        raise ConfigError(
            f"model.overrides.vocab_size={model.vocab_size}: tokenizer={config.tokenizer} has {known} ids; set it to {known} or more")
    return model


def check_model(config: ExperimentConfig, model_config: ModelConfig) -> None:
    """Refuse what this model cannot do. The sections cannot: reading a preset loads JAX.

    Raises: ConfigError.
    """
    replay, preset = config.rl.replay, config.model.preset
    require(replay == "none" or model_config.moe_layers > 0, "rl.replay", replay, f"model.preset={preset} has no experts: rl.replay=none")
    indexed = model_config.indexer is not None
    require(replay != "all" or indexed, "rl.replay", replay, f"model.preset={preset} has no indexer: rl.replay=none or experts")
    for name in ("balance_loss", "bias_rate"):
        value = getattr(config.sft, name)
        require(value == 0 or model_config.moe_layers > 0, f"sft.{name}", value, f"model.preset={preset} has no experts: sft.{name}=0")
    steps, remedy = config.sft.mtp_steps, "has no MTP module: sft.mtp_loss=0 and sft.mtp_steps=0, or model.overrides.mtp.layers=1"
    require(steps == 0 or model_config.mtp is not None, "sft.mtp_steps", steps, f"model.preset={preset} {remedy}")
    from glm_jax.model.layer import REMAT

    require(config.model.remat in REMAT, "model.remat", config.model.remat, f"one of {', '.join(REMAT)}")
    if (expert := config.mesh.expert) > 1:
        experts = model_config.moe.experts if model_config.moe_layers else 0
        remedy = f"must divide the {experts} experts of model.preset={preset}"
        require(experts > 0 and experts % expert == 0, "mesh.expert", expert, remedy)
    if (model := config.mesh.model) > 1:
        kind, heads = ("", model_config.heads) if model_config.gqa is None else ("key ", model_config.gqa.kv_heads)
        require(heads % model == 0, "mesh.model", model, f"must divide the {heads} {kind}heads of model.preset={preset}")



def tokenizer(config: ExperimentConfig) -> Tokenizer:
    """Raises: ConfigError for a file that is not there or is no tokenizer."""
    if config.tokenizer == "byte":
        return ByteTokenizer()
    try:
        return load_tokenizer(config.tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer={config.tokenizer}: {error}") from error


def _merge(base: ExperimentConfig | type[ExperimentConfig], changes: omegaconf.DictConfig) -> ExperimentConfig:
    structured = OmegaConf.structured(base)
    OmegaConf.set_readonly(structured, False)  # frozen dataclasses start read-only; the merge is into a copy
    try:
        return OmegaConf.to_object(OmegaConf.merge(structured, changes))
    except omegaconf.errors.OmegaConfBaseException as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'config'}: {first_line}") from None


def _check_key(key: str, root: type) -> None:
    """Walk `key` through the dataclasses; below a dict (model.overrides) anything goes."""
    here, path = root, []
    for part in key.split("."):
        if not dataclasses.is_dataclass(here):
            if typing.get_origin(here) is dict:
                return
            raise ConfigError(f"unknown key {key!r}: {'.'.join(path)} is a value, not a section")
        hints = typing.get_type_hints(here)
        if part not in hints:
            siblings = [".".join([*path, name]) for name in hints]
            unknown = ".".join([*path, part])
            close = difflib.get_close_matches(part, hints, n=1, cutoff=0.5)
            best = [".".join([*path, *close])] if close else difflib.get_close_matches(key, _all_keys(root), n=1, cutoff=0.5)
            hint = f"the nearest key is {best[0]!r}" if best else f"known here: {', '.join(siblings)}"
            raise ConfigError(f"unknown key {unknown!r}: {hint}")
        here, path = hints[part], [*path, part]
    if dataclasses.is_dataclass(here):
        keys = ", ".join(f"{key}.{name}" for name in typing.get_type_hints(here))
        raise ConfigError(f"{key!r} is a section: set one of its keys, {keys}")


def _all_keys(section: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(section).items():
        keys += _all_keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [prefix + name]
    return keys


def _leaf_keys(node: omegaconf.DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for name in node:
        child = node._get_node(name)
        keys += _leaf_keys(child, f"{prefix}{name}.") if OmegaConf.is_dict(child) else [f"{prefix}{name}"]
    return keys

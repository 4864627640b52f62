"""One module per named config: `config() -> ExperimentConfig`, and if it likes `debug(config)` and `sweep_NAME()`."""

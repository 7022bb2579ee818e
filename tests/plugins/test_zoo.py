"""One environment with plugins of every kind of brokenness and a good one, as the command and an engine see it."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

HOOK = "\n@anyattn.hookimpl\ndef anyattn_{}():\n    "

BACKENDS = """
import dataclasses
from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.torch_native import TorchNativeBackend


class Good(TorchNativeBackend):
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, priority=99)


class Lacking(AttentionBackend):
    capabilities = TorchNativeBackend.capabilities
    run = TorchNativeBackend.run


class Undeclared(AttentionBackend):
    plan = TorchNativeBackend.plan
    run = TorchNativeBackend.run


class WithoutPlan(TorchNativeBackend):
    def run(self, q, kv, out, *, sinks=None, alibi_slopes=None):
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Private(Capabilities):
    handle: object = dataclasses.field(default_factory=object)


class Unwritable(TorchNativeBackend):
    capabilities = Private(
        **{field.name: getattr(Good.capabilities, field.name) for field in dataclasses.fields(Capabilities)}
    )


class Unreadable(type(TorchNativeBackend)):
    @property
    def capabilities(cls):
        raise SystemExit(3)


class Exiting(AttentionBackend, metaclass=Unreadable):
    plan = TorchNativeBackend.plan
    run = TorchNativeBackend.run
"""

STORAGE = """
import dataclasses
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.base import AllocatorCapabilities, PoolCapabilities
from anyattn.mem_cache.pool import MHAPool
from anyattn.types import ANY_INT


class WithoutDevice(PagedAllocator):
    def __init__(self, num_pages, page_size, *, debug=False):
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateAllocator(AllocatorCapabilities):
    handle: object = dataclasses.field(default_factory=object)


class UnwritableAllocator(PagedAllocator):
    capabilities = PrivateAllocator(page_sizes=ANY_INT)


class WithoutSlots(MHAPool):
    def store(self, layer, k, v):
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivatePool(PoolCapabilities):
    handle: object = dataclasses.field(default_factory=object)


class UnwritablePool(MHAPool):
    capabilities = PrivatePool(kind="mha", kv_dtypes=frozenset({"float32"}))
"""

PROBES = """
import os, sys, time
from anyattn import Platform, ProbeResult


def good():
    device = Platform(kind="good", vendor="v", name="n", arch="a", torch_device="good:0", problems=("not real",))
    return ProbeResult(devices=(device,))


def hangs():
    time.sleep(600)


def garbage():
    yield good()


def exits():
    sys.exit(0)


number = 3
"""

CLASH = "'same' is offered by plugin clash_one (clash_one 1.0) and plugin clash_two (clash_two 1.0); none is used"
UNWRITABLE = "has capabilities without a JSON form (TypeError: Object of type object is not JSON serializable): their "
NO_NAME = "has no METADATA that names a distribution: delete that folder, then run `pip install --force-reinstall "

LOADED_IN_PART = {
    "raising_hook": ("kv_pools", "raise ValueError('boom')", "anyattn_kv_pools failed: ValueError: boom"),
    "exiting_hook": ("kv_pools", "raise SystemExit(3)", "anyattn_kv_pools failed: RuntimeError: SystemExit: 3"),
    "garbage_hook": ("kv_pools", "yield 'x'", "it returned generator, not a dict of names"),
    "garbage_offer": ("kv_pools", "return {'p1': dict}", "is not a name with its 'package.module:attribute'"),
    "no_module": ("kv_pools", "return {'p2': 'nonesuch:X'}", "ModuleNotFoundError: No module named 'nonesuch'"),
    "no_attribute": (
        "kv_pools",
        "return {'p3': 'zoo_probes:X'}",
        "AttributeError: module 'zoo_probes' has no attribute",
    ),
    "no_pool": ("kv_pools", "return {'p4': 'zoo_backends:Good'}", "is no subclass of KVPool"),
    "no_allocator": ("kv_allocators", "return {'a1': 'builtins:dict'}", "is no subclass of KVAllocator"),
    "no_method": ("attention_backends", "return {'b1': 'zoo_backends:Lacking'}", "lacks plan of AttentionBackend"),
    "undeclared": ("attention_backends", "return {'b2': 'zoo_backends:Undeclared'}", "has no capabilities of type"),
    "wrong_signature": (
        "attention_backends",
        "return {'b3': 'zoo_backends:WithoutPlan'}",
        "zoo_backends:WithoutPlan has methods that do not fit AttentionBackend: run: it is (self, q, kv, out, *, "
        "sinks=None, alibi_slopes=None), which cannot be called as (self, q, kv, plan, out, *, sinks=None, "
        "alibi_slopes=None): too many positional arguments",
    ),
    "wrong_constructor": (
        "kv_allocators",
        "return {'a2': 'zoo_storage:WithoutDevice'}",
        "methods that do not fit KVAllocator: __init__: it is (self, num_pages, page_size, *, debug=False), which ",
    ),
    "wrong_store": ("kv_pools", "return {'p5': 'zoo_storage:WithoutSlots'}", "store: it is (self, layer, k, v), which"),
    "unwritable": ("attention_backends", "return {'b4': 'zoo_backends:Unwritable'}", UNWRITABLE),
    "unwritable_allocator": ("kv_allocators", "return {'a3': 'zoo_storage:UnwritableAllocator'}", UNWRITABLE),
    "unwritable_pool": ("kv_pools", "return {'p6': 'zoo_storage:UnwritablePool'}", UNWRITABLE),
    "unreadable": (
        "attention_backends",
        "return {'b5': 'zoo_backends:Exiting'}",
        "zoo_backends:Exiting cannot be read: RuntimeError: SystemExit: 3",
    ),
    "no_device": ("simulated_devices", "return {'s1': 'zoo_probes:good'}", "is no Platform with simulated=True"),
    "no_probe": ("platforms", "return {'number': 'zoo_probes:number'}", "the number probe of"),
    "clash_one": ("kv_pools", "return {'same': 'a:B'}", CLASH),
    "clash_two": ("kv_pools", "return {'same': 'a:B'}", CLASH),
    "usurper": ("attention_backends", "return {'torch_native': 'zoo_backends:Good'}", "the built-in is used"),
}
"""By plugin: a hook, what it does, and what is said about it."""

FAILED = {
    "import_error": ("import nonesuch", "No module named 'nonesuch': run `pip check`"),
    "syntax_error": ("def :", "SyntaxError: invalid syntax"),
    "raises": ("raise RuntimeError('boom')", "cannot be imported: RuntimeError: boom"),
    "exits": ("import sys; sys.exit(0)", "cannot be imported: RuntimeError: SystemExit: 0"),
    "recurses": ("def f(): f()\nf()", "cannot be imported: RecursionError"),
    "mute": ("class E(Exception):\n    def __str__(self): raise E\nraise E", "cannot be imported: E"),
    "older": ("contract_version = 0", "contract version 0, and this anyattn has 1: run `pip install --upgrade older`"),
    "newer": (
        "contract_version = 2",
        "contract version 2, and this anyattn has 1: run `pip install --upgrade anyattn`",
    ),
    "huge": ("contract_version = 10**5000", "which is no integer, or a huge one"),
    "wordy": ("contract_version = '1'", "a contract version of type str, which is no integer"),
    "unstated": ("del contract_version", "states no contract version: set contract_version = 1 in it"),
    "hookless": ("", "implements no hook: mark anyattn_platforms or"),
    "misspelt": (HOOK.format("atention_backends") + "return {}", "does not fit the hooks"),
    "demanding": ("@anyattn.hookimpl\ndef anyattn_kv_pools(x): return {}", "does not fit the hooks"),
}
"""By plugin that is not loaded at all: its source and what is said about it."""

STALE = {
    "gone": "gone is not there: run `pip install --force-reinstall gone`, or `pip uninstall gone`",
    "targetless": "has no 'plugin', which its entry point names: run `pip install --force-reinstall targetless`",
    "unmoored": "was installed as editable from /nonesuch/unmoored, which is gone; run `pip uninstall unmoored`",
    "nameless": f"{NO_NAME}nameless`",
    "bare": f"{NO_NAME}bare`",
    "double": "until pip finds none, then `pip install double`",
}
"""By plugin: what is said about its metadata."""

SCRIPT = """
import functools, json, threading
import anyattn
from anyattn import discovery
from anyattn.plugins.manager import PluginManager

discovery.PluginManager = functools.partial(PluginManager, time_limit_s=3.0)
plugins = discovery.plugin_manager()
detection = discovery.detect(plugins)
spec = anyattn.AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
cpu = discovery.find_device(plugins, "cpu", detection)
runtime = anyattn.create_runtime(spec, num_layers=1, num_pages=4, device=cpu)
print(json.dumps({
    "kinds": [device.kind for device in detection.devices],
    "records": {record.name: record.problems for record in plugins.records},
    "chosen": runtime.selection.decode,
    "shape": list(runtime.extend(runtime.new_sequences(1), [3]).positions.shape),
}))
"""


@pytest.fixture(scope="module")
def zoo(site_at, tmp_path_factory):
    """The environment of a process that has all of these installed."""
    site = site_at(tmp_path_factory.mktemp("zoo"))
    site.module("zoo_backends", BACKENDS)
    site.module("zoo_storage", STORAGE)
    site.module("zoo_probes", PROBES)
    good = HOOK.format("attention_backends") + "return {'good': 'zoo_backends:Good'}"
    site.plugin("good", good + HOOK.format("platforms") + "return {'good': 'zoo_probes:good'}", version="1.2")
    site.plugin(
        "talker", "import os\nprint('a word')\nos.write(1, b'and more')" + HOOK.format("kv_pools") + "return {}"
    )
    probes = {name: f"zoo_probes:{name}" for name in ("hangs", "garbage", "exits")}
    site.plugin("prober", HOOK.format("platforms") + f"return {probes}")
    for name, (hook, body, _) in LOADED_IN_PART.items():
        site.plugin(name, HOOK.format(hook) + body)
    for name, (source, _) in FAILED.items():
        site.plugin(name, source)
    for name in ("first", "second"):
        site.plugin(name, good, entry_points=f"twin = {name}")
    site.metadata("gone")
    site.plugin("targetless", good, entry_points="targetless = targetless:plugin")
    site.metadata("unmoored", direct_url='{"url": "file:///nonesuch/unmoored", "dir_info": {"editable": true}}')
    site.plugin("nameless", good, metadata="Metadata-Version: 2.1\n")
    site.plugin("bare", good, metadata=None)
    site.plugin("double", good)
    site.metadata("double", "2.0")
    path = os.pathsep.join(filter(None, [str(site.folder), os.environ.get("PYTHONPATH")]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ANYATTN_")}
    return clean | {"PYTHONPATH": path}


def python(environment, *arguments, **settings):
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def with_all(zoo):
    """By name, processes that have all of these; side by side, as each waits for the probe that hangs."""
    commands = {
        "json": ("-m", "anyattn", "plugins", "--json"),
        "table": ("-m", "anyattn", "plugins"),
        "engine": ("-c", SCRIPT),
    }
    with ThreadPoolExecutor() as pool:
        return dict(zip(commands, pool.map(lambda arguments: python(zoo, *arguments), commands.values()), strict=True))


@pytest.fixture(scope="module")
def ended(with_all):
    return with_all["json"]


@pytest.fixture(scope="module")
def records(ended):
    """By name; what has a name twice is not here."""
    found = json.loads(ended.stdout)["plugins"]
    names = [record["name"] for record in found]
    return {record["name"]: record for record in found if names.count(record["name"]) == 1}


def test_every_plugin_is_accounted_for(records, ended):
    assert records.keys() == {"anyattn", "good", "talker", "prober", *LOADED_IN_PART, *FAILED, *STALE}
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", LOADED_IN_PART)
def test_what_is_wrong_with_a_plugins_hooks_and_offers_is_said_once(records, name):
    record = records[name]
    assert (record["state"], record["contract_version"]) == ("loaded", 1)
    (problem,) = record["problems"]
    assert LOADED_IN_PART[name][-1] in problem
    assert f"plugin {name} ({name} 1.0)" in problem


@pytest.mark.parametrize("name", FAILED)
def test_why_a_plugin_is_not_loaded_is_said_once(records, name):
    record = records[name]
    assert (record["state"], record["offers"]) == ("failed", {})
    (problem,) = record["problems"]
    assert problem.startswith(f"plugin {name} ({name} 1.0) ")
    assert FAILED[name][-1] in problem


@pytest.mark.parametrize("name", STALE)
def test_what_mends_stale_metadata_is_said_once(records, name):
    record = records[name]
    assert record["state"] == "failed"
    (problem,) = record["problems"]
    assert STALE[name] in problem


def test_the_stated_contract_version_is_shown_where_there_is_one(records):
    versions = {name: records[name]["contract_version"] for name in ("older", "newer", "wordy", "unstated", "raises")}
    assert versions == {"older": 0, "newer": 2, "wordy": None, "unstated": None, "raises": None}


@pytest.mark.parametrize("name", ["anyattn", "good", "talker"])
def test_the_good_ones_beside_them_are_as_they_are(records, name):
    assert (records[name]["state"], records[name]["problems"]) == ("loaded", [])


def test_what_is_wrong_with_a_plugins_probes_is_said_beside_what_it_offers(records):
    assert records["prober"]["state"] == "loaded"
    assert [problem.split(" failed: ")[0] for problem in records["prober"]["problems"]] == [
        f"the {name} probe of plugin prober (prober 1.0)" for name in ("hangs", "garbage", "exits")
    ]


def test_the_good_one_is_shown_with_all_it_offers(records):
    assert records["good"] == {
        "name": "good",
        "distribution": "good",
        "version": "1.2",
        "target": "good",
        "state": "loaded",
        "contract_version": 1,
        "offers": {
            "anyattn_platforms": {"good": "zoo_probes:good"},
            "anyattn_attention_backends": {"good": "zoo_backends:Good"},
        },
        "problems": [],
    }


def test_two_distributions_with_one_plugin_name_are_both_named(ended):
    twins = [record for record in json.loads(ended.stdout)["plugins"] if record["name"] == "twin"]
    assert [(record["distribution"], record["state"]) for record in twins] == [
        ("first", "failed"),
        ("second", "failed"),
    ]
    for record in twins:
        assert record["problems"] == [
            "plugin name 'twin' is taken by first 1.0 and second 1.0; none is loaded: uninstall one of them."
        ]


@pytest.mark.parametrize("command", ["plugins", "doctor", "backends"])
def test_what_a_plugin_prints_does_not_get_into_the_json(zoo, command):
    ended = python(zoo, "-m", "anyattn", command, "--json", ANYATTN_PLUGINS="talker,good")
    assert json.loads(ended.stdout)
    assert "a word" in ended.stderr
    assert "and more" in ended.stderr


def test_the_table_tells_all_of_it_to_people(with_all):
    ended = with_all["table"]
    assert ended.returncode == 1
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    for line in ("good good 1.2 1 loaded", "no_pool no_pool 1.0 1 loaded, in part", "older older 1.0 0 failed"):
        assert line in lines
    after = lines[lines.index("good offers") + 1 :]
    assert after[:2] == ["platforms good", "attention backends good"]
    for name, (*_, text) in (LOADED_IN_PART | FAILED).items():
        assert any(line.startswith(f"{name} ") and text in line for line in lines), name


def test_the_allow_list_leaves_all_others_alone(zoo):
    ended = python(zoo, "-m", "anyattn", "plugins", "--json", ANYATTN_PLUGINS="good, typo")
    found = {record["name"]: record for record in json.loads(ended.stdout)["plugins"]}
    assert ended.returncode == 1
    assert found.pop("typo")["state"] == "missing"
    assert [found.pop(name)["state"] for name in ("anyattn", "good")] == ["loaded", "loaded"]
    assert {record["state"] for record in found.values()} == {"not allowed"}
    assert [problem for record in found.values() for problem in record["problems"]] == []
    assert python(zoo, "-m", "anyattn", "plugins", ANYATTN_PLUGINS="good").returncode == 0


def test_strict_mode_ends_with_the_first_failure_and_its_text(zoo, records):
    ended = python(zoo, "-m", "anyattn", "plugins", ANYATTN_STRICT="1", ANYATTN_PLUGINS="good,older")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"error: {records['older']['problems'][0]}\n"


def test_an_engine_runs_on_the_good_one_beside_all_of_them(with_all):
    ended = with_all["engine"]
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1].removeprefix("and more"))
    assert {"good", "cpu"} <= set(answer["kinds"])
    assert (answer["chosen"], answer["shape"]) == ("good", [3])
    problems = "\n".join(answer["records"]["prober"])
    for text in (
        "the hangs probe of plugin prober (prober 1.0) failed: TimeLimitError: it did not end within 3 s",
        "the garbage probe of plugin prober (prober 1.0) failed: TypeError: it returned generator, not ProbeResult",
        "the exits probe of plugin prober (prober 1.0) failed: RuntimeError: SystemExit: 0",
    ):
        assert text in problems
    assert "Traceback" not in ended.stderr

"""Plugins of every kind of brokenness: one clear message each, and everything else still works."""

import dataclasses
import importlib.metadata
import json
import sys
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from anyattn import AttentionSpec, NoBackendError, PluginLoadError, create_runtime, discovery, hookimpl
from anyattn.attention.backend import AttentionBackend
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.plugins import builtin, hookspecs
from anyattn.plugins.loading import HOOKS
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.requirements import alternatives, missing_packages

BUILT_IN = sorted(builtin.anyattn_attention_backends())


class Distribution:
    def __init__(self, name):
        self.metadata = {"Name": name, "Version": "1.0"}

    def read_text(self, filename):
        return None


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """Makes an importable plugin module from hooks and returns its entry point."""

    def make(name, *, contract_version=1, distribution=None, source=None, **hooks):
        module = types.ModuleType(f"zoo_{name}")
        if contract_version is not None:
            module.contract_version = contract_version
        for hook, result in hooks.items():
            setattr(module, hook, hookimpl(make_hook(hook, result)))
        if source is None:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        if source == "exiting":
            (tmp_path / f"{module.__name__}.py").write_text("import sys; sys.exit(0)")
            monkeypatch.syspath_prepend(tmp_path)
        entry_point = importlib.metadata.EntryPoint(name, module.__name__, hookspecs.ENTRY_POINT_GROUP)
        object.__setattr__(entry_point, "dist", Distribution(distribution or f"{name}-dist"))
        return entry_point

    return make


def make_hook(name, result):
    def hook():
        if isinstance(result, BaseException):
            raise result
        return result

    hook.__name__ = name
    return hook


class Mine(TorchNativeBackend):
    pass


class Lacking(AttentionBackend):
    capabilities = TorchNativeBackend.capabilities
    run = TorchNativeBackend.run


class Undeclared(TorchNativeBackend):
    capabilities = {}  # noqa: RUF012


class BadPackages(TorchNativeBackend):
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, packages=("not a requirement!",))


MINE = {"mine": f"{__name__}:Mine"}


@pytest.fixture(autouse=True)
def importable_here(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or types.SimpleNamespace(**globals()))


def test_the_built_ins_come_through_the_same_hooks():
    manager = PluginManager(entry_points=[])
    assert sorted(manager.attention_backends()) == BUILT_IN
    assert {offer.distribution for offer in manager.attention_backends().values()} == {"anyattn"}
    assert list(manager.platforms()) == ["cuda", "rocm", "ascend", "xpu", "musa", "apple", "cpu"]
    assert {"h100", "mi300x", "xeon-amx", "m3"} <= manager.simulated_devices().keys()
    assert sorted(manager.kv_pools()) == ["ascend_mha", "ascend_mla", "ascend_nz", "dsa", "mha", "mla"]
    assert sorted(manager.kv_allocators()) == ["paged"]
    assert manager.problems == []


def test_every_built_in_offer_can_be_loaded():
    manager = PluginManager(entry_points=[], strict=True)
    discovery.load_offers(manager)
    assert len(discovery.candidates(manager).backends) == len(BUILT_IN)


def test_the_built_in_plugin_has_a_record_like_any_other():
    (record,) = PluginManager(entry_points=[]).records
    assert (record.name, record.distribution, record.state) == ("anyattn", "anyattn", "loaded")
    assert (record.target, record.contract_version, record.problems) == ("anyattn.plugins.builtin", 1, ())
    assert record.offers.keys() == set(HOOKS)
    assert record.offers["anyattn_kv_allocators"] == builtin.anyattn_kv_allocators()


def test_a_plugins_backend_is_a_candidate_with_its_distributions_name(plugin):
    manager = PluginManager(entry_points=[plugin("zoo", anyattn_attention_backends=MINE)])
    mine = next(c for c in discovery.candidates(manager).backends if c.name == "mine")
    assert mine.distribution == "zoo-dist"
    assert manager.problems == []


BROKEN = [
    ("import error", {"source": "missing"}, "cannot be imported: zoo_broken is not there: run `pip install"),
    ("no contract version", {"contract_version": None}, "states no contract version: set contract_version = 1"),
    (
        "newer contract version",
        {"contract_version": 99},
        "contract version 99, and this anyattn has 1: run `pip install --upgrade anyattn`, or",
    ),
    (
        "older contract version",
        {"contract_version": 0},
        "contract version 0, and this anyattn has 1: run `pip install --upgrade broken-dist`",
    ),
    (
        "contract version in words",
        {"contract_version": "1"},
        "of type str, which is no integer, or a huge one: set contract_version = 1",
    ),
    ("true contract version", {"contract_version": True}, "of type bool, which is no integer"),
    ("exit at import", {"source": "exiting"}, "cannot be imported: RuntimeError: SystemExit: 0"),
    ("exit in a hook", {"anyattn_attention_backends": SystemExit(3)}, "failed: RuntimeError: SystemExit: 3"),
    ("raising hook", {"anyattn_attention_backends": ValueError("boom")}, "failed: ValueError: boom"),
    ("hook without a dictionary", {"anyattn_attention_backends": 3}, "failed: TypeError: it returned int, not a"),
    ("no hook at all", {}, "implements no hook: mark anyattn_platforms or"),
    ("unknown hook", {"anyattn_atention_backends": {}}, "does not fit the hooks"),
    ("dotted name that is not there", {"anyattn_attention_backends": {"x": "zoo_x.no:X"}}, "cannot be imported"),
    ("not a backend", {"anyattn_attention_backends": {"x": "builtins:dict"}}, "no subclass of AttentionBackend"),
    ("target that is no dotted name", {"anyattn_attention_backends": {"x": dict}}, "is not a name with its"),
    ("no capabilities", {"anyattn_attention_backends": {"x": f"{__name__}:Undeclared"}}, "no capabilities of type"),
    ("unreadable packages", {"anyattn_attention_backends": {"x": f"{__name__}:BadPackages"}}, "cannot be read"),
    ("missing method", {"anyattn_attention_backends": {"x": f"{__name__}:Lacking"}}, "lacks plan of AttentionBackend"),
]


@pytest.mark.parametrize(("fields", "message"), [pytest.param(*case[1:], id=case[0]) for case in BROKEN])
def test_a_broken_plugin_gives_one_message_and_the_others_still_work(plugin, fields, message):
    points = [plugin("broken", **fields), plugin("good", anyattn_attention_backends=MINE)]
    manager = PluginManager(entry_points=points)
    names = sorted(c.name for c in discovery.candidates(manager).backends)
    discovery.candidates(manager)
    assert names == sorted([*BUILT_IN, "mine"])
    assert len(manager.problems) == 1
    assert message in manager.problems[0]
    assert "plugin broken (broken-dist 1.0)" in manager.problems[0]
    _, broken, good = manager.records
    assert list(broken.problems) == manager.problems
    assert good.problems == ()


@pytest.mark.parametrize(("fields", "message"), [pytest.param(*case[1:], id=case[0]) for case in BROKEN])
def test_strict_mode_makes_a_broken_plugin_raise(plugin, fields, message):
    with pytest.raises(PluginLoadError, match="broken"):
        discovery.candidates(PluginManager(entry_points=[plugin("broken", **fields)], strict=True))


def test_a_name_from_two_distributions_is_an_error_that_names_both_and_belongs_to_neither(plugin):
    points = [plugin("one", anyattn_attention_backends=MINE), plugin("two", anyattn_attention_backends=MINE)]
    manager = PluginManager(entry_points=points)
    assert sorted(manager.attention_backends()) == BUILT_IN
    assert manager.problems == [
        "attention backend 'mine' is offered by plugin one (one-dist 1.0) and plugin two (two-dist 1.0); none is used: "
        "uninstall one or keep it out with ANYATTN_PLUGINS."
    ]
    assert [list(record.problems) for record in manager.records[1:]] == [manager.problems, manager.problems]


def test_no_plugin_can_take_a_built_ins_name(plugin):
    taken = {"torch_native": f"{__name__}:Mine"}
    manager = PluginManager(entry_points=[plugin("zoo", anyattn_attention_backends=taken)])
    assert manager.attention_backends()["torch_native"].distribution == "anyattn"
    assert "the built-in is used: the plugin must choose another name" in manager.problems[0]
    assert "plugin zoo (zoo-dist 1.0)" in manager.problems[0]
    assert [bool(record.problems) for record in manager.records] == [False, True]


def test_two_entry_points_of_one_name_are_reported_with_both_distributions_and_none_is_loaded(plugin):
    points = [plugin("zoo", distribution=name, anyattn_attention_backends=MINE) for name in ("first", "second")]
    manager = PluginManager(entry_points=points)
    assert sorted(manager.attention_backends()) == BUILT_IN
    assert manager.problems == [
        "plugin name 'zoo' is taken by first 1.0 and second 1.0; none is loaded: uninstall one of them."
    ]
    records = [(record.distribution, record.state, list(record.problems)) for record in manager.records[1:]]
    assert records == [("first", "failed", manager.problems), ("second", "failed", manager.problems)]


def test_a_plugin_cannot_be_named_like_the_built_in_one(plugin):
    manager = PluginManager(entry_points=[plugin("anyattn", anyattn_attention_backends=MINE)])
    assert sorted(manager.attention_backends()) == BUILT_IN
    assert "is the built-in's; that of anyattn-dist 1.0 is not loaded: rename it" in manager.problems[0]
    assert [record.state for record in manager.records] == ["loaded", "failed"]
    assert manager.records[0].problems == ()


def test_two_entry_points_may_lead_to_one_object(plugin):
    first = plugin("one", anyattn_attention_backends={})
    second = importlib.metadata.EntryPoint("two", first.value, hookspecs.ENTRY_POINT_GROUP)
    manager = PluginManager(entry_points=[first, second])
    assert manager.problems == []
    assert [record.distribution for record in manager.records[1:]] == ["one-dist", None]


def test_a_failure_is_kept_in_the_record_of_the_plugin_that_is_to_blame(plugin):
    points = [plugin(name, anyattn_attention_backends={}) for name in ("one", "two")]
    manager = PluginManager(entry_points=points)
    for _ in range(2):
        manager.report("two is broken", plugin="two")
    manager.report("nobody is to blame")
    assert manager.problems == ["two is broken", "nobody is to blame"]
    assert [record.problems for record in manager.records] == [(), (), ("two is broken",)]


def test_a_hook_that_fails_takes_no_other_hook_of_its_plugin_with_it(plugin):
    hooks = {"anyattn_kv_pools": ValueError("boom"), "anyattn_attention_backends": MINE}
    manager = PluginManager(entry_points=[plugin("zoo", **hooks)])
    assert manager.attention_backends()["mine"].version == "1.0"
    record = manager.records[1]
    assert (record.state, record.offers) == ("loaded", {"anyattn_attention_backends": MINE})
    assert record.problems == ("plugin zoo (zoo-dist 1.0): anyattn_kv_pools failed: ValueError: boom",)


def test_records_are_json_values_and_cannot_be_changed(plugin):
    record = PluginManager(entry_points=[plugin("zoo", anyattn_attention_backends=MINE)]).records[1]
    assert json.loads(json.dumps(record.to_json())) == {
        "name": "zoo",
        "distribution": "zoo-dist",
        "version": "1.0",
        "target": "zoo_zoo",
        "state": "loaded",
        "contract_version": 1,
        "offers": {"anyattn_attention_backends": MINE},
        "problems": [],
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.state = "failed"


def test_a_hook_is_called_once(plugin):
    point = plugin("zoo", anyattn_attention_backends={})
    calls = []
    once = hookimpl(specname="anyattn_attention_backends")(lambda: calls.append(1) or {})
    sys.modules[point.value].anyattn_attention_backends = once
    manager = PluginManager(entry_points=[point])
    assert manager.attention_backends() == manager.attention_backends()
    assert calls == [1]


def test_a_hook_wrapper_is_refused(plugin):
    def wrapper():
        return (yield)

    point = plugin("zoo", anyattn_attention_backends={})
    wrapping = hookimpl(wrapper=True, specname="anyattn_attention_backends")(wrapper)
    sys.modules[point.value].anyattn_attention_backends = wrapping
    assert "wraps a hook, and there is nothing to wrap" in PluginManager(entry_points=[point]).problems[0]


def test_a_plugin_that_failed_is_told_when_its_backend_is_asked_for(site):
    site.metadata("zoo")
    spec = AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
    with pytest.raises(NoBackendError, match=r"plugin zoo \(zoo 1.0\) cannot be imported"):
        create_runtime(spec, num_layers=1, num_pages=4, device="cpu", backend="zoo")
    assert any("plugin zoo" in problem for problem in discovery.detect().problems)


@pytest.mark.parametrize(("allow", "found"), [(None, True), ({"zoo"}, True), ({"other"}, False), (set(), False)])
def test_the_allow_list_decides_which_entry_points_load(plugin, allow, found):
    point = plugin("zoo", anyattn_attention_backends=MINE)
    manager = PluginManager(entry_points=[point], allow=None if allow is None else frozenset(allow))
    assert ("mine" in manager.attention_backends()) is found
    record = next(record for record in manager.records if record.name == "zoo")
    assert record.state == ("loaded" if found else "not allowed")
    assert (record.distribution, record.version, record.problems) == ("zoo-dist", "1.0", ())


def test_what_is_not_allowed_is_not_imported_and_not_complained_of(plugin):
    points = [plugin("zoo", source="exiting"), plugin("zoo", source="exiting"), plugin("b a d", source="missing")]
    manager = PluginManager(entry_points=points, allow=frozenset({"anyattn"}))
    assert manager.problems == []
    assert [record.state for record in manager.records[1:]] == ["not allowed"] * 3


BACKENDS = """
import dataclasses
from anyattn.attention.torch_native import TorchNativeBackend


class Mine(TorchNativeBackend):
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, priority=99)


class Unmakeable(Mine):
    def __init__(self, spec, cache, platform):
        raise ZeroDivisionError("no kernel")
"""


def test_a_plugins_backend_wins_by_priority_and_serves(site, hook):
    site.module("zoo_backends", BACKENDS)
    site.plugin("zoo", hook("attention_backends", mine="zoo_backends:Mine"))
    spec = AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
    rt = create_runtime(spec, num_layers=1, num_pages=4, device="cpu")
    assert rt.selection.decode == "mine"
    assert "from zoo" in rt.selection.explain()
    assert type(rt.plan(rt.extend(rt.new_sequences(1), [1])).steps[0].backend).__name__ == "Mine"


def test_a_plugins_backend_that_cannot_be_made_is_named_with_its_distribution(site, hook):
    site.module("zoo_backends", BACKENDS)
    site.plugin("zoo", hook("attention_backends", broken="zoo_backends:Unmakeable"))
    spec = AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
    with pytest.raises(PluginLoadError, match=r"'broken' of .*zoo.* cannot be made: ZeroDivisionError: no kernel"):
        create_runtime(spec, num_layers=1, num_pages=4, device="cpu", backend="broken")


@pytest.mark.parametrize("name", ["", " ", "a b", "\x1b[31mred"])
def test_names_that_a_terminal_or_a_user_could_not_take_are_refused(plugin, name):
    manager = PluginManager(entry_points=[plugin("zoo", anyattn_attention_backends={name: MINE["mine"]})])
    assert sorted(manager.attention_backends()) == BUILT_IN
    assert "is not a name" in manager.problems[0]
    assert "a plugin is named" in PluginManager(entry_points=[plugin(name)]).problems[0]


def test_an_allow_list_with_a_name_that_nobody_provides_is_told(plugin):
    manager = PluginManager(entry_points=[plugin("zoo", source="exiting")], allow=frozenset({"typo", "anyattn"}))
    assert manager.problems == [
        "ANYATTN_PLUGINS names 'typo', which no installed distribution provides; installed: 'zoo'."
    ]
    missing = manager.records[1]
    assert (missing.name, missing.state, list(missing.problems)) == ("typo", "missing", manager.problems)
    assert missing.distribution is missing.version is missing.target is None


def test_a_requirement_whose_marker_does_not_hold_is_not_missing():
    assert missing_packages(["no-such-package; python_version < '3'"], "") == ()


def test_missing_packages_are_told_from_metadata():
    assert missing_packages(["pluggy>=1"], "cuda") == ()
    old, absent = missing_packages(["pluggy>=999", "no-such-package>=1"], "cuda")
    assert old.supported.endswith("is installed")
    assert (absent.supported, absent.remedy) == ("not installed", 'pip install "anyattn[cuda]"')
    assert missing_packages(["no-such-package"], "")[0].remedy == 'pip install "no-such-package"'


def test_what_a_backend_needs_is_what_its_extra_brings():
    tomllib = pytest.importorskip("tomllib")
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    for candidate in discovery.candidates(PluginManager(entry_points=[])).backends:
        capabilities = candidate.capabilities
        extra = capabilities.extra or "cpu"  # without an extra it is a portable one, which needs no more than torch
        brought = {Requirement(text).name: Requirement(text).specifier for text in extras[extra]}
        for entry in capabilities.packages:
            named = [Requirement(text) for text in alternatives(entry) if not text.startswith("module:")]
            if not capabilities.extra:  # whose remedy names the package itself
                named = []
            assert all(each.name == "torch" or brought[each.name] == each.specifier for each in named)

"""Plugins of every kind of brokenness: one clear message each, and everything else still works."""

import dataclasses
import importlib.metadata
import sys
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from anyattn import AttentionSpec, NoBackendError, PluginLoadError, create_runtime, hookimpl, wiring
from anyattn.attention.backend import AttentionBackend
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.plugins import builtin, hookspecs
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.requirements import missing_packages

BUILT_IN = sorted(builtin.anyattn_attention_backends())


class Distribution:
    def __init__(self, name):
        self.name = name


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
    assert sorted(manager.platforms()) == ["cpu", "cuda"]
    assert sorted(manager.kv_pools()) == ["mha", "mla"]
    assert sorted(manager.kv_allocators()) == ["paged"]
    assert manager.problems == []


def test_every_built_in_offer_can_be_loaded():
    manager = PluginManager(entry_points=[], strict=True)
    for offers in (manager.platforms, manager.attention_backends, manager.kv_allocators, manager.kv_pools):
        for offer in offers().values():
            assert manager.load(offer) is not None
    assert len(wiring.candidates(manager).backends) == len(BUILT_IN)


def test_a_plugins_backend_is_a_candidate_with_its_distributions_name(plugin):
    manager = PluginManager(entry_points=[plugin("zoo", anyattn_attention_backends=MINE)])
    mine = next(c for c in wiring.candidates(manager).backends if c.name == "mine")
    assert mine.distribution == "zoo-dist"
    assert manager.problems == []


BROKEN = [
    ("import error", {"source": "missing"}, "cannot be imported: ModuleNotFoundError"),
    ("no contract version", {"contract_version": None}, "states no contract version: set contract_version = 1"),
    ("wrong contract version", {"contract_version": 99}, "contract version 99, and this anyattn has 1"),
    ("exit at import", {"source": "exiting"}, "cannot be imported: RuntimeError: SystemExit: 0"),
    ("exit in a hook", {"anyattn_attention_backends": SystemExit(3)}, "raised RuntimeError: SystemExit: 3"),
    ("raising hook", {"anyattn_attention_backends": ValueError("boom")}, "raised ValueError: boom"),
    ("hook without a dictionary", {"anyattn_attention_backends": 3}, "raised TypeError"),
    ("no hook at all", {}, "implements no hook: mark anyattn_attention_backends"),
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
    names = sorted(c.name for c in wiring.candidates(manager).backends)
    wiring.candidates(manager)
    assert names == sorted([*BUILT_IN, "mine"])
    assert len(manager.problems) == 1
    assert message in manager.problems[0]
    assert "broken" in manager.problems[0]


@pytest.mark.parametrize(("fields", "message"), [pytest.param(*case[1:], id=case[0]) for case in BROKEN])
def test_strict_mode_makes_a_broken_plugin_raise(plugin, fields, message):
    with pytest.raises(PluginLoadError, match="broken"):
        wiring.candidates(PluginManager(entry_points=[plugin("broken", **fields)], strict=True))


def test_a_name_from_two_distributions_is_an_error_that_names_both_and_belongs_to_neither(plugin):
    points = [plugin("one", anyattn_attention_backends=MINE), plugin("two", anyattn_attention_backends=MINE)]
    manager = PluginManager(entry_points=points)
    assert sorted(manager.attention_backends()) == BUILT_IN
    assert manager.problems == [
        "'mine' is offered by one-dist, two-dist; none is used: uninstall one or set ANYATTN_PLUGINS."
    ]


def test_no_plugin_can_take_a_built_ins_name(plugin):
    taken = {"torch_native": f"{__name__}:Mine"}
    manager = PluginManager(entry_points=[plugin("zoo", anyattn_attention_backends=taken)])
    assert manager.attention_backends()["torch_native"].distribution == "anyattn"
    assert "the built-in is used" in manager.problems[0]


def test_two_entry_points_of_one_name_are_reported_with_both_distributions_and_none_is_loaded(plugin):
    points = [plugin("zoo", distribution=name, anyattn_attention_backends=MINE) for name in ("first", "second")]
    manager = PluginManager(entry_points=points)
    assert sorted(manager.attention_backends()) == BUILT_IN
    assert manager.problems == [
        "plugin name 'zoo' is taken by first, second; none is loaded: uninstall or rename one."
    ]


def test_a_plugin_that_failed_is_told_when_its_backend_is_asked_for(plugin, monkeypatch):
    points, others = [plugin("zoo", source="missing")], importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **params: points if params == {"group": "anyattn.plugins"} else others(**params),
    )
    spec = AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
    with pytest.raises(NoBackendError, match=r"plugin zoo \(zoo-dist\) cannot be imported"):
        create_runtime(spec, num_layers=1, num_pages=4, device="cpu", backend="zoo")
    assert any("plugin zoo" in problem for problem in wiring.detect().problems)


@pytest.mark.parametrize(("allow", "found"), [(None, True), ({"zoo"}, True), ({"other"}, False), (set(), False)])
def test_the_allow_list_decides_which_entry_points_load(plugin, allow, found):
    point = plugin("zoo", anyattn_attention_backends=MINE)
    manager = PluginManager(entry_points=[point], allow=None if allow is None else frozenset(allow))
    assert ("mine" in manager.attention_backends()) is found


def test_a_probe_that_raises_or_returns_nonsense_is_reported_and_the_others_still_run(plugin):
    probes = {"odd": "builtins:dict", "bad": f"{__name__}:raising_probe"}
    manager = PluginManager(entry_points=[plugin("zoo", anyattn_platforms=probes)])
    detection = wiring.detect(manager)
    assert any(device.kind == "cpu" for device in detection.devices)
    assert sorted(manager.problems) == [
        "the bad probe of zoo-dist failed: RuntimeError: no driver",
        "the odd probe of zoo-dist failed: TypeError: it returned dict, not ProbeResult",
    ]


def raising_probe():
    raise RuntimeError("no driver")


def test_a_plugins_backend_wins_by_priority_and_serves(plugin, monkeypatch):
    monkeypatch.setattr(Mine, "capabilities", dataclasses.replace(Mine.capabilities, priority=99), raising=False)
    point, others = plugin("zoo", anyattn_attention_backends=MINE), importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **params: [point] if params == {"group": "anyattn.plugins"} else others(**params),
    )
    spec = AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
    rt = create_runtime(spec, num_layers=1, num_pages=4, device="cpu")
    assert rt.selection.decode == "mine"
    assert "from zoo-dist" in rt.selection.explain()
    assert type(rt.plan(rt.extend(rt.new_sequences(1), [1])).steps[0].backend).__name__ == "Mine"


class Unmakeable(TorchNativeBackend):
    def __init__(self, spec, cache, platform):
        raise ZeroDivisionError("no kernel")


def test_a_plugins_backend_that_cannot_be_made_is_named_with_its_distribution(plugin, monkeypatch):
    point = plugin("zoo", anyattn_attention_backends={"broken": f"{__name__}:Unmakeable"})
    others = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **params: [point] if params == {"group": "anyattn.plugins"} else others(**params),
    )
    spec = AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
    with pytest.raises(PluginLoadError, match=r"'broken' of zoo-dist cannot be made: ZeroDivisionError: no kernel"):
        create_runtime(spec, num_layers=1, num_pages=4, device="cpu", backend="broken")


@pytest.mark.parametrize("name", ["", " ", "a b", "\x1b[31mred"])
def test_names_that_a_terminal_or_a_user_could_not_take_are_refused(plugin, name):
    manager = PluginManager(entry_points=[plugin("zoo", anyattn_attention_backends={name: MINE["mine"]})])
    assert sorted(manager.attention_backends()) == BUILT_IN
    assert "is not a name" in manager.problems[0]
    assert "a plugin is named" in PluginManager(entry_points=[plugin(name)]).problems[0]


def test_an_allow_list_with_a_name_that_nobody_provides_is_told():
    manager = PluginManager(entry_points=[], allow=frozenset({"typo"}))
    assert manager.problems == ["ANYATTN_PLUGINS names 'typo', which no installed distribution provides."]


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
    for candidate in wiring.candidates(PluginManager(entry_points=[])).backends:
        capabilities = candidate.capabilities
        brought = {Requirement(text).name: Requirement(text).specifier for text in extras.get(capabilities.extra, ())}
        for text in capabilities.packages:
            assert brought[Requirement(text).name] == Requirement(text).specifier

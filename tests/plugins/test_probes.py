"""What detection makes of plugins' probes: good ones, broken ones, and ones that never come back."""

import pytest

from anyattn import PluginLoadError, detect, discovery
from anyattn.plugins.manager import PluginManager

PROBES = """
import threading
from anyattn import Platform, ProbeResult

gate = threading.Event()


def device(kind="tpu", **facts):
    return Platform(**{"kind": kind, "vendor": "v", "name": "n", "arch": "a", "torch_device": f"{kind}:0", **facts})


def tpu():
    return ProbeResult(devices=(device(),), problems=("a fan is loud",))


def lists():
    return [device()]


def generates():
    yield device()


def raises():
    raise RuntimeError("no driver")


def exits():
    raise SystemExit(0)


def interrupts():
    raise KeyboardInterrupt


def recurses():
    return recurses()


def other_kind():
    return ProbeResult(devices=(device("npu"), device("other_kind")))


def twice():
    return ProbeResult(devices=(device("twice", name="first"), device("twice", name="second")))


def pretends():
    return ProbeResult(devices=(device("pretends", simulated=True), device("pretends", torch_device="pretends:1")))


def wrong_type():
    return ProbeResult(devices=("tpu:0",))


def hangs():
    gate.wait(60)
    raise RuntimeError("too late")


number = 3
"""


@pytest.fixture
def probes(site, hook):
    """Installs a plugin that offers these probes."""

    def install(*names):
        site.module("zoo_probes", PROBES)
        site.plugin("zoo", hook("platforms", **{name: f"zoo_probes:{name}" for name in names}))

    return install


@pytest.fixture
def opened_gate():
    """Lets what hangs go on in the end."""
    yield
    import zoo_probes

    zoo_probes.gate.set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lists", "failed: TypeError: it returned list, not ProbeResult"),
        ("generates", "failed: TypeError: it returned generator, not ProbeResult"),
        ("raises", "failed: RuntimeError: no driver"),
        ("exits", "failed: RuntimeError: SystemExit: 0"),
        ("interrupts", "failed: RuntimeError: KeyboardInterrupt"),
        ("recurses", "failed: RecursionError: maximum recursion depth exceeded"),
        ("wrong_type", "failed: TypeError: devices of a ProbeResult must be a tuple of Platform"),
        ("number", "failed: TypeError: zoo_probes:number is no function"),
        ("nonesuch", "zoo_probes:nonesuch cannot be imported: AttributeError: module 'zoo_probes' has no attribute"),
    ],
)
def test_a_broken_probe_is_one_problem_and_the_others_devices_are_found(probes, plugin_threads, name, text):
    probes("tpu", name)
    manager = PluginManager()
    detection = discovery.detect(manager)
    assert {"cpu", "tpu"} <= {device.kind for device in detection.devices}
    assert "a fan is loud" in detection.problems
    (problem,) = manager.problems
    assert text in problem
    assert name in problem
    assert "plugin zoo (zoo 1.0)" in problem
    assert manager.records[1].problems == (problem,)
    assert plugin_threads() == []
    with pytest.raises(PluginLoadError) as caught:
        discovery.detect(PluginManager(strict=True))
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("name", "kept", "text"),
    [
        ("other_kind", ["other_kind:0"], "found a device of kind 'npu', which is left out: give every kind"),
        ("twice", ["twice:0"], "found 'twice:0' twice, which is left out: torch must tell devices of one kind apart."),
        ("pretends", ["pretends:1"], "found 'pretends:0' simulated, which is left out: offer it in anyattn_simul"),
    ],
)
def test_a_device_that_its_probe_may_not_find_is_left_out_and_the_others_are_kept(probes, name, kept, text):
    probes(name)
    manager = PluginManager()
    detection = discovery.detect(manager)
    assert [device.torch_device for device in detection.devices if device.kind in (name, "npu")] == kept
    assert text in manager.problems[0]
    assert next(device.name for device in detection.devices if device.kind == name) in ("first", "n")


def test_a_probe_that_never_comes_back_costs_the_time_limit_once_and_no_device(probes, opened_gate, plugin_threads):
    probes("hangs", "tpu")
    manager = PluginManager(time_limit_s=2.0)
    detection = discovery.detect(manager)
    assert {"cpu", "tpu"} <= {device.kind for device in detection.devices}
    assert manager.problems == [
        "the hangs probe of plugin zoo (zoo 1.0) failed: TimeLimitError: it did not end within 2 s and is left "
        "behind; see whether the device's driver answers"
    ]
    assert manager.records[1].problems == tuple(manager.problems)
    assert len(plugin_threads()) == 1


def test_a_probe_whose_module_never_ends_its_import_is_left_behind_too(site, hook, plugin_threads):
    site.module("zoo_gate", "import threading\ngate = threading.Event()\n")
    site.module("zoo_slow", "import zoo_gate\nzoo_gate.gate.wait(60)\n")
    site.plugin("zoo", hook("platforms", slow="zoo_slow:probe"))
    manager = PluginManager(time_limit_s=1.0)
    detection = discovery.detect(manager)
    import zoo_gate

    zoo_gate.gate.set()
    assert detection.devices[-1].kind == "cpu"
    late = "TimeLimitError: it did not end within 1 s and is left behind; see whether the device's driver answers"
    assert manager.records[1].problems == (f"the slow probe of plugin zoo (zoo 1.0) failed: {late}",)
    for thread in plugin_threads():
        thread.join(60)


def test_a_plugin_that_detects_while_it_is_imported_neither_stalls_nor_loses_itself_for_good(site, hook):
    source = "contract_version = None\nfound = anyattn.detect()\ncontract_version = 1\n"
    site.plugin("zoo", source + hook("platforms", tpu="zoo_probes:tpu"), contract_version=None)
    site.module("zoo_probes", PROBES)
    import zoo

    assert any("plugin zoo (zoo 1.0) states no contract version" in problem for problem in zoo.found.problems)
    assert PluginManager().records[1].state == "loaded"


def test_devices_come_in_the_order_of_the_offers_and_a_plugins_before_the_cpu(probes):
    probes("tpu")
    assert [device.kind for device in detect().devices][-2:] == ["tpu", "cpu"]


def test_what_is_offered_and_does_not_fit_is_a_problem_before_it_is_used(site, hook):
    site.module("zoo_probes", PROBES)
    offers = {"real": "zoo_probes:tpu", "true": "zoo_probes:number"}
    site.plugin("zoo", hook("platforms", number="zoo_probes:number") + hook("simulated_devices", **offers))
    manager = PluginManager()
    discovery.load_offers(manager)
    assert manager.records[1].problems == (
        "the number probe of plugin zoo (zoo 1.0) failed: TypeError: zoo_probes:number is no function",
        "'real' of plugin zoo (zoo 1.0): zoo_probes:tpu is no Platform with simulated=True.",
        "'true' of plugin zoo (zoo 1.0): zoo_probes:number is no Platform with simulated=True.",
    )


def test_a_plugins_simulated_device_can_be_asked_for(site, hook):
    site.module("zoo_probes", PROBES + "\nsoon = device(simulated=True)\n")
    site.plugin("zoo", hook("simulated_devices", soon="zoo_probes:soon"))
    manager = PluginManager()
    assert manager.load(manager.simulated_devices()["soon"]).kind == "tpu"

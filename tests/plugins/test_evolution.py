"""A plugin that was written once and never touched again goes on working while the contract grows by a field."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, GraphLevel, NoBackendError, discovery
from anyattn.attention.reference import reference_attention
from anyattn.plugins.manager import PluginManager
from anyattn.testing.check import CannotRunError
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.target import find_targets

FROZEN = Path(__file__).parent / "frozen_v1" / "anyattn_frozen_v1"
SHA256 = "58434ca597f5bd9eec40c144d26478629ada1d94277b409ed383b79a8c03bcb2"
SPEC = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype="float32", sliding_window=9)


@pytest.fixture
def installed(site):
    """The frozen plugin, in the environment of this process; the value is that of another one's."""
    shutil.copytree(FROZEN, site.folder / FROZEN.name, ignore=shutil.ignore_patterns("__pycache__"))
    site.metadata("anyattn-frozen-v1", "1.0", entry_points=f"frozen = {FROZEN.name}")
    path = os.pathsep.join(filter(None, [str(site.folder), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def test_the_frozen_plugin_is_what_it_was():
    """It stands for plugins that are out there and get no notice: what it needs, the contract has to keep."""
    digest = hashlib.sha256()
    for path in sorted(FROZEN.glob("*.py")):
        digest.update(f"{path.name}\n{path.read_text()}".encode())
    assert digest.hexdigest() == SHA256


@pytest.mark.usefixtures("installed")
def test_it_is_loaded_and_nothing_is_wrong_with_it():
    plugins = PluginManager()
    discovery.load_offers(plugins)
    (record,) = [record for record in plugins.records if record.name == "frozen"]
    assert (record.state, record.contract_version, record.problems) == ("loaded", 1, ())
    assert {name for names in record.offers.values() for name in names} == {"frozen", "frozen_paged", "frozen1"}


@pytest.mark.usefixtures("installed")
def test_it_is_selected_here_and_on_its_own_device():
    found = anyattn.survey(SPEC, device="cpu").selection
    assert (found.prefill, found.decode, found.page_size, found.layout) == ("frozen", "frozen", 16, "HND")
    assert "priority 60, from anyattn-frozen-v1" in found.explain()
    found = anyattn.survey(SPEC.replace(graph="always"), device="sim:frozen1").selection
    assert (found.prefill, found.decode) == ("frozen", "frozen")


@pytest.mark.usefixtures("installed")
def test_an_engine_runs_on_its_backend_and_its_allocator():
    rt = anyattn.create_runtime(SPEC, num_layers=1, num_pages=32, device="cpu", allocator="frozen_paged")
    assert (rt.selection.decode, rt.selection.allocator) == ("frozen", "frozen_paged")
    assert worst_error(rt, SPEC) < 1e-5  # float32 against float64, of values around 1


def worst_error(rt, spec):
    """Of a prefill and three decodes, against float64."""
    (seq,) = rt.new_sequences(1)
    keys, values, errors = torch.empty(0, 2, 64), torch.empty(0, 2, 64), []
    for count in (21, 1, 1, 1):
        q, k, v = (torch.randn(count, heads, 64) for heads in (8, 2, 2))
        keys, values = torch.cat([keys, k]), torch.cat([values, v])
        out = rt.run(0, q, k, v, rt.plan(rt.extend([seq], [count])))
        errors.append(float((out.double() - reference_attention(spec, q, keys, values)[0]).abs().max()))
    rt.free([seq])
    return max(errors)


def failed(checks):
    """By id, what was raised by each check that failed."""
    found = {}
    for check in checks:
        try:
            check.run(0)
        except CannotRunError:
            continue
        except Exception as error:
            found[check.id] = str(error)
    return found


@pytest.mark.usefixtures("installed")
def test_it_passes_the_kits_contract_tier():
    from anyattn.testing.allocators import checks as allocators
    from anyattn.testing.contract import backends as backend_contract
    from anyattn.testing.contract import platforms

    tiers = {"backend": backend_contract.checks, "allocator": allocators.contract_checks}
    targets = [*find_targets("frozen", PluginManager()), *find_targets("frozen_paged", PluginManager())]
    assert sorted({target.kind for target in targets}) == ["allocator", "backend", "platform", "simulated device"]
    for target in targets:
        assert failed(tiers.get(target.kind, platforms.checks)(target)) == {}


@pytest.mark.usefixtures("installed")
def test_it_computes_what_it_declares():
    """Each twelfth case stands for the kit's: the plugin's own author would run all of them."""
    (backend,) = (target.loaded for target in find_targets("frozen", PluginManager()) if target.kind == "backend")
    for case in list(cases_for(backend.capabilities))[::12]:
        assert check_case(backend, case, discovery.usable_device("cpu"), 0).failure is None, case.name


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_its_graphs_can_be_replayed():
    """As far as each twelfth check sees it; tests/testing/test_graph_kit.py has the whole tier."""
    from anyattn.testing.graphs import checks as graphs

    (backend,) = (target.loaded for target in find_targets("frozen", PluginManager()) if target.kind == "backend")
    emulated = dataclasses.replace(discovery.usable_device("cpu"), graph=GraphLevel.ALWAYS)
    assert failed(list(graphs.checks(backend, emulated))[::12]) == {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesSpec(AttentionSpec):
    """With a field of an engine's own."""

    talking_heads: bool = False


@pytest.mark.usefixtures("installed")
def test_a_field_of_an_engines_own_is_served_at_its_neutral_value_and_refused_by_name_otherwise():
    spec = EnginesSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype="float32")
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=32, device="cpu", allocator="frozen_paged")
    assert rt.selection.decode == "frozen"
    assert worst_error(rt, spec) < 1e-5
    with pytest.raises(NoBackendError, match="frozen: talking_heads: wanted True, supported only False"):
        anyattn.create_runtime(spec.replace(talking_heads=True), num_layers=1, num_pages=32, device="cpu")


GROWN_SPEC = """
import dataclasses
import anyattn.attention.spec as spec_module

spec_module.AttentionSpec = dataclasses.make_dataclass(
    "AttentionSpec",
    [("talking_heads", bool, False)],
    bases=(spec_module.AttentionSpec,),
    frozen=True,
    slots=True,
    kw_only=True,
)
"""

GROWN_CAPABILITIES = """
import anyattn.attention.capabilities as capabilities_module

Before = capabilities_module.Capabilities


def reject_reasons(self, spec, platform, role, **paging):
    reasons = Before.reject_reasons(self, spec, platform, role, **paging)
    if spec.talking_heads and not self.talking_heads:
        reasons.append(capabilities_module._model_reason("talking_heads", True, [False]))
    return reasons


capabilities_module._JUDGED_FIELDS |= {"talking_heads"}
capabilities_module.Capabilities = dataclasses.make_dataclass(
    "Capabilities",
    [("talking_heads", bool, False)],
    bases=(Before,),
    namespace={"reject_reasons": reject_reasons},
    frozen=True,
    slots=True,
    kw_only=True,
)
"""

LATER = """
import json
import anyattn
from anyattn import discovery
from anyattn.plugins.manager import PluginManager
from anyattn.testing.allocators import checks as allocators
from anyattn.testing.contract import backends as backend_contract
from anyattn.testing.contract import platforms
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.target import find_targets
from tests.plugins.test_evolution import failed, worst_error

spec = anyattn.AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype="float32", sliding_window=9)
asked = spec.replace(talking_heads=True)
plugins = PluginManager()
rt = anyattn.create_runtime(spec, num_layers=1, num_pages=32, device="cpu", allocator="frozen_paged")
tiers = {"backend": backend_contract.checks, "allocator": allocators.contract_checks}
targets = [target for name in ("frozen", "frozen_paged") for target in find_targets(name, plugins)]
backend = next(target.loaded for target in targets if target.kind == "backend")
some = list(cases_for(backend.capabilities))[::32]
verdicts = anyattn.survey(asked, device="cpu").verdicts[asked]
print(json.dumps({
    "fields": [field.name for field in dataclasses.fields(anyattn.AttentionSpec)][-1:],
    "declares": hasattr(backend.capabilities, "talking_heads"),
    "problems": plugins.problems,
    "chosen": rt.selection.decode,
    "error": worst_error(rt, spec),
    "contract": {t.kind: failed(tiers.get(t.kind, platforms.checks)(t)) for t in targets},
    "wrong": [c.name for c in some if check_case(backend, c, discovery.usable_device("cpu"), 0).failure],
    "reasons": [str(reason) for v in verdicts if v.name == "frozen" for reason in v.reasons],
    "refused": str(anyattn.survey(asked, device="cpu").error),
}))
"""


@pytest.mark.parametrize(
    ("grown", "reason"),
    [
        (GROWN_SPEC, "talking_heads: wanted True, supported only False, as this field is not known here"),
        (GROWN_SPEC + GROWN_CAPABILITIES, "talking_heads: wanted True, supported False"),
    ],
    ids=["by a field that specs have", "by a field that specs and declarations have"],
)
def test_after_the_contract_has_grown_it_works_as_before_and_what_is_new_is_refused_by_name(installed, grown, reason):
    """In a process in which the contract has one more field before anything that uses it is imported."""
    ended = subprocess.run(
        [sys.executable, "-c", grown + LATER],
        cwd=Path(__file__).parents[2],
        env=installed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["fields"], found["declares"]) == (["talking_heads"], "Capabilities" in grown)
    assert (found["problems"], found["chosen"]) == ([], "frozen")
    assert found["error"] < 1e-5
    assert found["contract"] == {kind: {} for kind in ("backend", "allocator", "platform", "simulated device")}
    assert found["wrong"] == []
    assert len(found["reasons"]) == 2  # one in each role
    assert all(text.startswith(reason) for text in found["reasons"])
    assert "talking_heads" in found["refused"]

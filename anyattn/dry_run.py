"""What would be chosen on a device, here or elsewhere, for a model's layers, and every reason against the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.arguments import checked_device, checked_layers, checked_preference
from anyattn.attention.judge import judge
from anyattn.attention.select import select_layers
from anyattn.attention.selection import Candidates, Preference, Selection, Verdict
from anyattn.attention.spec import AttentionSpec, layer_kinds, stretches
from anyattn.discovery import SIMULATED, Detection, candidates, detect, device_names, find_device, plugin_manager
from anyattn.errors import AnyattnError, NoBackendError, NoDeviceError
from anyattn.platforms.base import Platform
from anyattn.plugins.manager import PluginManager
from anyattn.settings import Settings
from anyattn.types import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The answer. Without selections, `error` says why there are none.

    layers: a spec for each layer.
    device: the one judged; with an error it may be one that cannot be used. None where the one asked for is not there.
    detection: what was found here; empty where a platform or a simulated device was asked about, which needs none.
    verdicts: of every backend in every role, for each distinct spec; none where there is no device.
    selections: what would be chosen for each distinct spec.
    """

    layers: tuple[AttentionSpec, ...]
    detection: Detection
    candidates: Candidates
    plugin_problems: tuple[str, ...]
    device: Platform | None
    verdicts: Mapping[AttentionSpec, tuple[Verdict, ...]]
    selections: Mapping[AttentionSpec, Selection]
    error: AnyattnError | None

    @property
    def selection(self) -> Selection | None:
        """What would be chosen for the first layer."""
        return self.selections[self.layers[0]] if self.selections else None

    def explain(self) -> str:
        """What would be chosen for each distinct spec, and why not the others; the error where nothing would be."""
        if self.error is not None:
            return str(self.error)
        kinds = layer_kinds(self.layers)
        titles = [f"layers    {stretches(layers)}\n" if len(kinds) > 1 else "" for layers in kinds.values()]
        return "\n\n".join(title + self.selections[kind].explain() for title, kind in zip(titles, kinds, strict=True))


def survey(
    spec: AttentionSpec | Sequence[AttentionSpec],
    *,
    device: Any = None,
    backend: str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | Sequence[str] | None = None,
    allocator: str | None = None,
    pool: str | None = None,
    page_size: int | None = None,
    layout: KVLayout | None = None,
    joined_layers: bool = False,
    installed_only: bool = False,
) -> Survey:
    """Detects and selects as `create_runtime` does, without allocating; nothing has to be here but anyattn.

    spec: of all layers, or one for each.
    device: a kind, a torch device, a simulated device ("sim:h100") or a platform; by default ANYATTN_PLATFORM, then
        the first usable device. On a simulated device the packages that backends need are taken as installed.
    installed_only: on a simulated device, count only the packages that are installed here.
    The other arguments are those of `create_runtime`, and so are the settings that fill in what is not given.

    Raises SpecError for an argument or setting that means nothing and, in strict mode, PluginLoadError. That there is
    no device or no backend is an answer: `error`.
    """
    settings = Settings.from_env()
    layers = checked_layers(spec, 1 if isinstance(spec, AttentionSpec) else None)
    preference = checked_preference(
        settings,
        backend=backend,
        prefill_backend=prefill_backend,
        decode_backend=decode_backend,
        allocator=allocator,
        pool=pool,
        page_size=page_size,
        layout=layout,
        joined_layers=joined_layers,
        installed_only=installed_only,
    )
    return survey_layers(layers, checked_device(settings, device), preference, plugin_manager(settings))


def survey_layers(
    layers: tuple[AttentionSpec, ...], wanted: Platform | str | None, preference: Preference, plugins: PluginManager
) -> Survey:
    """`survey` with its arguments checked. wanted: a platform or the name of a device; None for any."""
    elsewhere = isinstance(wanted, Platform) or (wanted or "").startswith(SIMULATED)
    detection = Detection(devices=(), problems=()) if elsewhere else detect(plugins)
    offered = candidates(plugins, detection)
    error: AnyattnError | None = None
    selections: dict[AttentionSpec, Selection] = {}
    platform: Platform | None
    try:
        platform = wanted if isinstance(wanted, Platform) else find_device(plugins, wanted, detection)
        selections = select_layers(layers, platform, offered, preference)
    except NoDeviceError as refusal:
        error = refusal
        # What is asked for but cannot be used is still judged; so is whatever is here where nothing was asked for.
        platform = next((d for d in detection.devices if wanted in (None, *device_names(d))), None)
    except NoBackendError as refusal:
        error = refusal
    return Survey(
        layers=layers,
        detection=detection,
        candidates=offered,
        plugin_problems=tuple(plugins.problems),
        device=platform,
        verdicts={kind: judge(kind, platform, offered, preference) for kind in layer_kinds(layers)} if platform else {},
        selections=selections,
        error=error,
    )


def backends_on(platform: Platform, spec: AttentionSpec | Sequence[AttentionSpec] | None = None) -> tuple[str, ...]:
    """What `Platform.backends` says."""
    offered = candidates(plugin_manager())
    if spec is None:
        return tuple(
            candidate.name
            for candidate in sorted(offered.backends, key=lambda candidate: candidate.name)
            if not (platform.problems or list(candidate.capabilities.device_reasons(platform)))
            and (platform.simulated or not candidate.missing)
        )
    layers = checked_layers(spec, 1 if isinstance(spec, AttentionSpec) else None)
    best: dict[str, float] = {}
    serving = {candidate.name for candidate in offered.backends}
    for kind in layer_kinds(layers):
        valid = [verdict for verdict in judge(kind, platform, offered, Preference()) if not verdict.reasons]
        serving &= {verdict.name for verdict in valid}
        for verdict in valid:
            best[verdict.name] = max(best.get(verdict.name, verdict.priority), verdict.priority)
    return tuple(sorted(serving, key=lambda name: (-best[name], name)))

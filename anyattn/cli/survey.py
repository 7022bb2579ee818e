"""The question that doctor and backends ask: what is here, and what would be chosen for this spec?"""

from __future__ import annotations

from dataclasses import dataclass

from anyattn.attention.select import judge, select
from anyattn.attention.selection import Candidates, Preference, Selection, Verdict
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import AnyattnError, NoBackendError, NoDeviceError
from anyattn.platforms.base import Platform
from anyattn.settings import Settings
from anyattn.types import KVLayout
from anyattn.wiring import Detection, candidates, choose_device, detect, plugin_manager


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The answer. Without a selection, `error` says why there is none.

    verdicts: of every candidate on `device`; none where there is no device.
    """

    spec: AttentionSpec
    detection: Detection
    candidates: Candidates
    plugin_problems: tuple[str, ...]
    device: Platform | None
    verdicts: tuple[Verdict, ...]
    selection: Selection | None
    error: AnyattnError | None


def survey(
    spec: AttentionSpec,
    *,
    device: str | None = None,
    backend: str | None = None,
    page_size: int | None = None,
    layout: KVLayout | None = None,
) -> Survey:
    """Detects and selects as `create_runtime` does, without allocating; the settings fill in what is not given.

    Raises SpecError for a setting that means nothing and, in strict mode, PluginLoadError.
    """
    settings = Settings.from_env()
    plugins = plugin_manager(settings)
    detection = detect(plugins)
    offered = candidates(plugins)
    preference = Preference(
        prefill_backend=backend or settings.prefill_backend,
        decode_backend=backend or settings.decode_backend,
        page_size=settings.page_size if page_size is None else page_size,
        layout=layout,
    )
    platform = selection = error = None
    verdicts: tuple[Verdict, ...] = ()
    try:
        platform = choose_device(detection, device or settings.platform)
        verdicts = judge(spec, platform, offered, preference)
        selection = select(spec, platform, offered, preference)
    except (NoDeviceError, NoBackendError) as refusal:
        error = refusal
    return Survey(
        spec=spec,
        detection=detection,
        candidates=offered,
        plugin_problems=tuple(plugins.problems),
        device=platform,
        verdicts=verdicts,
        selection=selection,
        error=error,
    )

"""docs/plugins.md names every hook with its exact signature, and no hook that does not exist."""

import inspect
import re
from pathlib import Path

from anyattn.plugins import hookspecs
from anyattn.plugins.loading import HOOKS

PAGE = (Path(__file__).parents[2] / "docs/plugins.md").read_text(encoding="utf-8")


def test_every_hook_is_documented_with_its_exact_signature_and_no_other_is():
    section = PAGE.partition("\n## Hooks\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^- `(def \w+\(.*)`:\n  \w", section, flags=re.MULTILINE)
    signatures = {hook: inspect.signature(getattr(hookspecs, hook), eval_str=True) for hook in HOOKS}
    assert sorted(documented) == sorted(f"def {hook}{signature}" for hook, signature in signatures.items())


def test_no_hook_is_named_anywhere_on_the_page_that_does_not_exist():
    assert set(re.findall(r"def (anyattn_\w+)", PAGE)) == set(HOOKS)

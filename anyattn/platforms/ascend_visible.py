"""What ASCEND_RT_VISIBLE_DEVICES shows of a machine's Ascend NPUs, by the rules of the CANN runtime."""

from __future__ import annotations

import re

_CHARACTERS_READ = 128


def visible_indices(count: int, setting: str | None) -> tuple[list[int], list[str]]:
    """Which of `count` devices CANN shows under ASCEND_RT_VISIBLE_DEVICES=`setting` (None: not set), and any complaint.

    Rules: CANN "Environment Variable Reference", ASCEND_RT_VISIBLE_DEVICES. What it leaves open (spaces, words, lists
    that are too long) is as `Runtime::GetVisibleDevices` does it (hicann/runtime, src/runtime/core/src/runtime.cc).
    """
    if setting is None:
        return list(range(count)), []
    readable = re.match(r"[0-9]+(?:,[0-9]+)*", setting[:_CHARACTERS_READ])  # the list ends where anything else begins
    text = readable.group() if readable else ""
    shown: list[int] = []
    for entry in text.split(",") if text else []:
        if len(shown) == count:  # what follows is not read, be it wrong or not
            return shown, []
        index = int(entry)
        if index >= count:  # ends the list; what came before stays
            return shown, [f'ASCEND_RT_VISIBLE_DEVICES="{setting}": no device {entry}, so the list ends before it']
        if shown and index <= shown[-1]:
            reason = "names a device twice, or not in ascending order, so CANN shows none"
            return [], [f'ASCEND_RT_VISIBLE_DEVICES="{setting}" {reason}']
        shown.append(index)
    rest = setting[len(text) :].strip(", ")
    if len(shown) < count and rest not in ("", "-1"):  # the usual ways of saying "none", or "no more"
        reason = f'CANN reads indices between commas without spaces, so the list ends before "{rest}"'
        return shown, [f'ASCEND_RT_VISIBLE_DEVICES="{setting}": {reason}']
    return shown, []

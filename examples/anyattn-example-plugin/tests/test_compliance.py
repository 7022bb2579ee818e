"""All that this package offers passes anyattn's compliance kit on the example device."""

import os
import subprocess
import sys


def test_what_is_offered_passes_the_compliance_kit():
    command = [sys.executable, "-m", "anyattn.testing", "example"]
    environment = {**os.environ, "EXAMPLE_DEVICES": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
